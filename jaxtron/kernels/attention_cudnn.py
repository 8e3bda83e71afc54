"""cuDNN flash attention through ``jax.nn.dot_product_attention``.

Packed documents enter as a boolean mask, which JAX hands to cuDNN as a bias of
``2 * batch * query * key`` bytes shared by all heads: exact for any number of documents. cuDNN's
own packed layout (offsets of documents) is not used: its backward pass allocates the query gradient
once for every document that a row might hold. H100, JAX 0.11.2, one row of 4096 tokens in 4
documents, 32 heads, 8 groups, head_dim 128, forward and backward: without documents 1.24 ms and
161 MiB of temporaries, mask 2.39 ms and 193 MiB, packed layout with at most 16 documents 0.76 ms
and 2096 MiB, with at most 64 1.29 ms and 8288 MiB.

Long packed rows are computed in tiles instead (``attention_tiles.py``), and on Hopper, where
possible, by kernels of our own (``attention_mosaic_gpu.py``).
"""

import jax
import jax.numpy as jnp

from jaxtron.kernels.attention_block import BlockKernel
from jaxtron.kernels.attention_block_cudnn import CudnnBlockKernel
from jaxtron.kernels.attention_spec import AttentionScoring, AttentionSpec
from jaxtron.kernels.attention_tiles import TiledBlockKernel

TILE = 2048


class CudnnAttention:
    """See the module."""

    name = "cudnn"
    fused = True
    tile: int | None = TILE
    blocks: BlockKernel = TiledBlockKernel(CudnnBlockKernel(), TILE)

    def supports(self, spec: AttentionSpec, platform: str) -> str | None:
        """bf16 and fp16 on an NVIDIA GPU, without dropout."""
        if platform not in ("gpu", "cuda"):
            return f"cuDNN needs an NVIDIA GPU, the platform is {platform}"
        if spec.dtype not in (jnp.bfloat16, jnp.float16):
            return f"cuDNN attention computes in bf16 or fp16, not {jnp.dtype(spec.dtype).name}"
        limit = _largest_head_dim()
        if spec.head_dim % 8 or spec.head_dim > limit:
            return f"head_dim {spec.head_dim} is not a multiple of 8 up to {limit}"
        if spec.dropout:
            return "cuDNN draws its own dropout mask, which depends on the layout"
        if spec.deterministic:
            return (
                "its backward pass adds in any order, and XLA (JAX 0.11.2) fails with an "
                "IndexError when it compiles the deterministic one"
            )
        if spec.key_segments:
            return "with segment ids of their own for the keys, a query that sees none is not zero"
        odd = spec.query_length % 2 or spec.key_length % 2
        if spec.segments and odd:
            return f"packed documents need an even sequence length, not {spec.query_length}"
        if spec.blocks and spec.window is not None and odd:
            return f"a window over blocks needs blocks of even length, not {spec.query_length}"
        return None

    def passed_over(self, spec: AttentionSpec) -> str | None:
        """Never."""
        return None

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, scoring: AttentionScoring
    ) -> jax.Array:
        """Attend; shapes as in ``dot_product_attention``."""
        window = scoring.window
        if window is not None and window >= k.shape[1]:
            window = None
        mask, segments, key_segments = None, scoring.segment_ids, scoring.key_segment_ids
        if segments is not None and key_segments is not None:
            mask = segments[:, None, :, None] == key_segments[:, None, None, :]
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            scale=scoring.scale,
            is_causal=scoring.causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )


def _largest_head_dim() -> int:
    """256 from Hopper on and when no GPU is there to be asked, else 128."""
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return 256
    major = int(str(device.compute_capability).split(".")[0])
    return 256 if major >= 9 else 128
