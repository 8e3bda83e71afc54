"""Exact attention in plain XLA operations: the reference for every other kernel.

Works on every platform, for every mask and dtype, with softmax in float32. Queries are processed in
blocks when all scores together would be large, and each block is recomputed in the backward pass,
so memory grows with the number of keys but not with its square.
"""

import jax
import jax.numpy as jnp

from jaxtron.kernels.attention_block import BlockKernel
from jaxtron.kernels.attention_block_xla import XlaBlockKernel
from jaxtron.kernels.attention_spec import AttentionScoring, AttentionSpec
from jaxtron.kernels.query_blocks import block_length, cut_blocks


class XlaAttention:
    """See the module."""

    name = "xla"
    fused = False
    blocks: BlockKernel = XlaBlockKernel()
    tile: int | None = None

    def supports(self, spec: AttentionSpec, platform: str) -> str | None:
        """Everything that :class:`AttentionSpec` can express."""
        return None

    def passed_over(self, spec: AttentionSpec) -> str | None:
        """Never."""
        return None

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, scoring: AttentionScoring
    ) -> jax.Array:
        """Attend; shapes as in ``dot_product_attention``."""
        batch, length, heads, _ = q.shape
        key_indices = jnp.arange(k.shape[1])
        window, dropout = scoring.window, scoring.dropout
        segment_ids, key_segment_ids = scoring.segment_ids, scoring.key_segment_ids

        def attend(query: dict[str, jax.Array]) -> jax.Array:
            visible = jnp.ones((1, query["index"].size, key_indices.size), bool)
            if scoring.causal:
                distance = query["index"][:, None] - key_indices
                visible &= distance >= 0
                if window is not None:
                    visible &= distance < window
            if key_segment_ids is not None:
                visible &= query["segment"][:, :, None] == key_segment_ids[:, None, :]
            probabilities = _probabilities(query["q"], k, visible, scoring.scale)
            if dropout is not None:
                probabilities = dropout.apply(probabilities, query["position"])
            return _weighted_values(probabilities, v, q.dtype)

        # Per-query inputs, and the axis on which they are cut into blocks.
        query, axes = {"q": q, "index": jnp.arange(length)}, {"q": 1, "index": 0}
        if segment_ids is not None:
            query["segment"], axes["segment"] = segment_ids, 1
        if dropout is not None:
            query["position"], axes["position"] = dropout.query_positions, 0

        block = block_length(length, 4 * batch * heads * k.shape[1])
        if block == length:
            return attend(query)
        blocks = {name: cut_blocks(query[name], axes[name], block) for name in query}
        # prevent_cse: the loop already keeps the recomputation apart from the forward pass.
        out = jax.lax.map(jax.checkpoint(attend, prevent_cse=False), blocks)
        return jnp.moveaxis(out, 0, 1).reshape(batch, -1, *out.shape[3:])[:, :length]


def _probabilities(q: jax.Array, k: jax.Array, visible: jax.Array, scale: float) -> jax.Array:
    """Softmax over visible keys [batch, heads, query, key] in float32; zeros if none is visible."""
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, head_dim)
    scores = jnp.einsum("bsgrd,btgd->bgrst", grouped, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, length, k.shape[1]) * scale
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    maximum = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(maximum == -jnp.inf, 0.0, maximum))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)


def _weighted_values(probabilities: jax.Array, v: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Sum of values [batch, query, heads, head_dim] in ``dtype``, accumulated in float32."""
    batch, heads, length, keys = probabilities.shape
    grouped = probabilities.astype(v.dtype).reshape(batch, v.shape[2], -1, length, keys)
    out = jnp.einsum("bgrst,btgd->bsgrd", grouped, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, length, heads, v.shape[-1]).astype(dtype)
