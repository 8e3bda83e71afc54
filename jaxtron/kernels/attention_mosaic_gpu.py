"""Packed rows by kernels of our own for Hopper (``attention_hopper.py``).

cuDNN takes documents as a bias, computes every score of the row and needs twice the time of a row
of one document. These kernels leave out what documents, or a window, hide.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.kernels.attention_block import BlockKernel, BlockMask
from jaxtron.kernels.attention_hopper import BLOCK, LOG2_E, backward, forward
from jaxtron.kernels.attention_spec import AttentionScoring, AttentionSpec
from jaxtron.layers.dropout import AttentionDropout

HEAD_DIM = 128


class MosaicGpuBlockKernel:
    """The interface of :class:`jaxtron.kernels.attention_block.BlockKernel`."""

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
        first, stop = visible_keys(mask, q.shape[0])
        out, lse = forward(q, k, v, first, stop, scale=scale)
        return out, lse / LOG2_E

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
        """Gradients from the merged output and log-sum-exp, the queries' in fp32."""
        first, stop = visible_keys(mask, q.shape[0])
        return backward(q, k, v, first, stop, out, lse * LOG2_E, dout, scale=scale)


class MosaicGpuAttention:
    """See the module."""

    name = "mosaic_gpu"
    fused = True
    tile: int | None = None
    blocks: BlockKernel = MosaicGpuBlockKernel()

    def supports(self, spec: AttentionSpec, platform: str) -> str | None:
        """Causal attention in bf16 or fp16 on a Hopper GPU."""
        if platform not in ("gpu", "cuda"):
            return f"it runs on GPUs of compute capability 9.0, and this is a {platform}"
        capability = _compute_capability()
        if capability not in (None, "9.0"):
            return f"it runs on compute capability 9.0, and this GPU has {capability}"
        if spec.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bf16 or fp16, not {jnp.dtype(spec.dtype).name}"
        if spec.head_dim != HEAD_DIM:
            return f"head_dim must be {HEAD_DIM}, and is {spec.head_dim}"
        if spec.query_length % BLOCK:
            what = "a chunk" if spec.blocks else "a row"
            return f"{what} must be a multiple of {BLOCK} tokens, and has {spec.query_length}"
        if not spec.causal:
            return "it is causal"
        if spec.dropout:
            return "it has no dropout"
        if spec.deterministic:
            return "its backward pass adds the queries' gradients in any order"
        if spec.key_segments:
            return "it takes no segment ids of their own for the keys"
        return None

    def passed_over(self, spec: AttentionSpec) -> str | None:
        """Rows that are not packed: cuDNN is faster."""
        return None if spec.segments else "rows are not packed"

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, scoring: AttentionScoring
    ) -> jax.Array:
        """Attend; shapes as in ``dot_product_attention``.

        The tokens of a document stand together, as packing puts them.
        """
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)
        segments = scoring.segment_ids
        mask = BlockMask(positions, positions, segments, segments, True, scoring.window)
        return _attend(q, k, v, *visible_keys(mask, q.shape[0]), scoring.scale)


def visible_keys(mask: BlockMask, batch: int) -> tuple[jax.Array, jax.Array]:
    """The stretch of keys that each query of a block sees.

    Args:
        mask: its documents' tokens stand together. Where the keys are not the queries' own, the
            numbers of documents ascend.
        batch: rows.

    Returns:
        int32 ``[batch, query]``, never falling: the first key, and the first behind those that are
        seen.
    """
    queries, keys = mask.query_positions, mask.key_positions
    search = functools.partial(jnp.searchsorted, method="scan_unrolled")
    place = jnp.broadcast_to(jnp.arange(len(queries), dtype=jnp.int32), (batch, len(queries)))
    first = jnp.zeros_like(place)
    stop = place + 1 if mask.own_keys else jnp.full_like(place, len(keys))
    if mask.query_segments is not None and mask.key_segments is not None:
        if mask.own_keys:
            begins = jnp.diff(mask.query_segments, axis=1) != 0
            first = first.at[:, 1:].set(jnp.where(begins, place[:, 1:], 0))
            first = lax.cummax(first, axis=1)
        else:
            of_rows = lambda side: jax.vmap(functools.partial(search, side=side))  # noqa: E731
            first = of_rows("left")(mask.key_segments, mask.query_segments)
            stop = of_rows("right")(mask.key_segments, mask.query_segments)
    if mask.window is not None:
        earliest = search(keys, queries - mask.window + 1)
        first = jnp.minimum(jnp.maximum(first, earliest), stop)
    return first.astype(jnp.int32), stop.astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, stop: jax.Array, scale: float
) -> jax.Array:
    return _forward(q, k, v, first, stop, scale)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, stop: jax.Array, scale: float
) -> tuple[jax.Array, Any]:
    out, lse = forward(q, k, v, first, stop, scale=scale)
    # Both are what the backward pass reads.
    out, lse = checkpoint_name(out, "core_attn"), checkpoint_name(lse, "core_attn")
    return out, (q, k, v, first, stop, out, lse)


def _backward(scale: float, residuals: Any, d_out: jax.Array) -> Any:
    dq, dk, dv = backward(*residuals, d_out, scale=scale)
    return dq.astype(d_out.dtype), dk, dv, None, None


_attend.defvjp(_forward, _backward)


def _compute_capability() -> str | None:
    """Of the first GPU; None when no GPU is there to be asked."""
    try:
        return str(jax.local_devices(backend="gpu")[0].compute_capability)
    except RuntimeError:
        return None
