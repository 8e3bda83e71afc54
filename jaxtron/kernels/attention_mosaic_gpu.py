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

from jaxtron.kernels.attention_block import BlockKernel
from jaxtron.kernels.attention_block_cudnn import CudnnBlockKernel
from jaxtron.kernels.attention_hopper import BLOCK, backward, forward
from jaxtron.kernels.attention_spec import AttentionScoring, AttentionSpec

HEAD_DIM = 128


class MosaicGpuAttention:
    """See the module."""

    name = "mosaic_gpu"
    fused = True
    tile: int | None = None
    blocks: BlockKernel = CudnnBlockKernel()  # never called: blocks are refused

    def supports(self, spec: AttentionSpec, platform: str) -> str | None:
        """Causal attention in bf16 or fp16 on a Hopper GPU, over the keys of the same tokens."""
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
            return f"the row must be a multiple of {BLOCK} tokens, and has {spec.query_length}"
        if not spec.causal:
            return "it is causal"
        if spec.dropout:
            return "it has no dropout"
        if spec.deterministic:
            return "its backward pass adds the queries' gradients in any order"
        if spec.key_segments:
            return "it takes no segment ids of their own for the keys"
        if spec.blocks:
            return "it computes whole rows, not a block of keys at a time"
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
        batch, length = q.shape[:2]
        first = first_visible_keys(batch, length, scoring.segment_ids, scoring.window)
        return _attend(q, k, v, first, scoring.scale)


def first_visible_keys(
    batch: int, length: int, segment_ids: jax.Array | None, window: int | None
) -> jax.Array:
    """The first key that each query sees, int32 ``[batch, length]``; never falls along a row.

    Args:
        batch: rows.
        length: of a row.
        segment_ids: int32 ``[batch, length]`` or None; a document is a run of one number.
        window: a query sees itself and ``window - 1`` earlier keys; None: all of them.
    """
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    first = jnp.zeros_like(place)
    if segment_ids is not None:
        begins = segment_ids[:, 1:] != segment_ids[:, :-1]
        first = first.at[:, 1:].set(jnp.where(begins, place[:, 1:], 0))
        first = lax.cummax(first, axis=1)
    if window is not None:
        first = jnp.maximum(first, place - window + 1)
    return first


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, scale: float) -> jax.Array:
    return _forward(q, k, v, first, scale)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, scale: float
) -> tuple[jax.Array, Any]:
    out, lse = forward(q, k, v, first, scale=scale)
    # Both are what the backward pass reads.
    out, lse = checkpoint_name(out, "core_attn"), checkpoint_name(lse, "core_attn")
    return out, (q, k, v, first, out, lse)


def _backward(scale: float, residuals: Any, d_out: jax.Array) -> Any:
    q, k, v, first, out, lse = residuals
    return *backward(q, k, v, first, out, lse, d_out, scale=scale), None


_attend.defvjp(_forward, _backward)


def _compute_capability() -> str | None:
    """Of the first GPU; None when no GPU is there to be asked."""
    try:
        return str(jax.local_devices(backend="gpu")[0].compute_capability)
    except RuntimeError:
        return None
