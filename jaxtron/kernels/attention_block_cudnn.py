"""The block kernel of cuDNN flash attention.

``jax.nn.dot_product_attention`` gives the log-sum-exp in the queries' dtype, too coarse for a
merge, and no backward pass with a log-sum-exp from outside, so cuDNN's two operations are called as
JAX itself calls them. Blocks of which every key is visible run without a mask, a block of the
queries' own keys with cuDNN's triangle; a window or packed documents enter besides as a bias of
``2 * batch * query * key`` bytes.
"""

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxtron.kernels.attention_block import BlockMask
from jaxtron.layers.dropout import AttentionDropout


class CudnnBlockKernel:
    """See the module; the interface is :class:`jaxtron.kernels.attention_block.BlockKernel`."""

    def forward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float,
        mask: BlockMask,
        dropout: AttentionDropout | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend. A query that sees no key has an lse below every possible score."""
        kind, bias = _mask(q, mask)
        out, lse = cudnn.dot_product_attention(
            q, k, v, bias, scale=scale, mask_type=kind, return_residual=True
        )
        return out, lse

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        out: jax.Array,
        lse: jax.Array,
        dout: jax.Array,
        *,
        scale: float,
        mask: BlockMask,
        dropout: AttentionDropout | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients in the dtype of ``q``, from the merged output and log-sum-exp."""
        kind, bias = _mask(q, mask)
        none = jnp.zeros(0, q.dtype)
        dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(
            *(q, k, v, none if bias is None else bias),
            *(none,) * 6,  # lengths and offsets of packed rows, page tables
            *(lse, out, dout),
            scale=scale,
            seed=42,
            dropout_rate=0.0,
            variadic_args=(bias is not None, False),  # (has a bias, which has a gradient)
            mask_type=kind,
            layout=cudnn.AttentionLayout.BTNH.value,
            sliding_window_length=None,
        )
        return dq, dk, dv


def _mask(q: jax.Array, mask: BlockMask) -> tuple[cudnn.MaskType, jax.Array | None]:
    """cuDNN's kind of mask, and a bias [batch or 1, 1, query, key]."""
    kind = cudnn.MaskType.CAUSAL if mask.own_keys else cudnn.MaskType.NO_MASK
    if mask.plain:
        return kind, None
    hidden = cudnn.get_large_negative_number(q.dtype)
    bias = jnp.where(mask.visible()[:, None], jnp.zeros((), q.dtype), hidden)
    return kind, bias
