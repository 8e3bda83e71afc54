"""Attention over a block of the keys, in a form whose results can be merged.

A block kernel gives, besides its output, the log-sum-exp of every query's scores. Outputs over
disjoint blocks of keys are merged with these as weights, exactly (Milakov and Gimelshein 2018,
arXiv:1805.02867; Liu et al. 2023, arXiv:2310.01889). In the backward pass a block needs the merged
output and log-sum-exp alone, so the gradients of blocks just add up (Dao 2023, arXiv:2307.08691).
"""

import functools
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxtron.layers.dropout import AttentionDropout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query_positions", "key_positions", "query_segments", "key_segments"],
    meta_fields=["own_keys", "window"],
)
@dataclass(frozen=True)
class BlockMask:
    """Which keys of a block its queries see, in causal attention.

    Attributes:
        query_positions: int32 [query], positions in the row, ascending. Where documents are cut
            by themselves (``parallel/context/balance.py``) these are places in the order of chunks.
        key_positions: int32 [key], as for the queries.
        query_segments: int32 [batch, query] numbers of documents, or None.
        key_segments: int32 [batch, key], or None.
        own_keys: the keys are those of the very same tokens as the queries; otherwise every key
            comes before every query.
        window: a query sees itself and ``window - 1`` earlier keys; None: all of them.
    """

    query_positions: jax.Array
    key_positions: jax.Array
    query_segments: jax.Array | None
    key_segments: jax.Array | None
    own_keys: bool
    window: int | None

    @property
    def plain(self) -> bool:
        """Whether order is all that counts: a triangle with ``own_keys``, else no mask at all."""
        return self.window is None and self.query_segments is None

    def visible(self) -> jax.Array:
        """Boolean [batch or 1, query, key]."""
        distance = self.query_positions[:, None] - self.key_positions
        visible = (distance >= 0)[None]
        if self.window is not None:
            visible &= distance < self.window
        if self.query_segments is not None and self.key_segments is not None:
            visible &= self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return visible

    def any_visible(self) -> jax.Array:
        """Whether any pair may be visible; never wrongly False, and exact when numbers ascend."""
        some = jnp.bool_(True)
        if self.window is not None:
            some &= jnp.min(self.query_positions) - jnp.max(self.key_positions) < self.window
        if self.query_segments is not None and self.key_segments is not None:
            queries, keys = self.query_segments, self.key_segments
            overlap = jnp.min(queries, axis=1) <= jnp.max(keys, axis=1)
            # chunks of whole documents: keys of a chunk before may belong to later documents
            overlap &= jnp.min(keys, axis=1) <= jnp.max(queries, axis=1)
            some &= jnp.any(overlap)
        return some

    def all_visible(self) -> jax.Array:
        """Whether every pair is visible that the order allows; never wrongly True."""
        every = jnp.bool_(True)
        if self.window is not None:
            every &= jnp.max(self.query_positions) - jnp.min(self.key_positions) < self.window
        if self.query_segments is not None and self.key_segments is not None:
            one = self.query_segments[:, :1]
            every &= jnp.all(self.query_segments == one) & jnp.all(self.key_segments == one)
        return every

    def by_order(self) -> "BlockMask":
        """The mask without documents and window, which is the same where ``all_visible()``."""
        return replace(self, query_segments=None, key_segments=None, window=None)


class BlockKernel(Protocol):
    """Forward and backward of attention over one block of keys.

    Shapes: q, out, dout ``[batch, query, heads, head_dim]``; k, v ``[batch, key, groups,
    head_dim]``; lse ``[batch, heads, query]`` fp32, natural logarithm, of the scaled scores. A
    query that sees no key of the block has an lse so low that its output has no weight.
    """

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
        """``(out, lse)`` over this block alone."""
        ...

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
        """This block's share of ``(dq, dk, dv)``; ``out`` and ``lse`` are over all blocks."""
        ...


def merge(
    out: jax.Array, lse: jax.Array, block_out: jax.Array, block_lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over two disjoint sets of keys from the attention over each.

    Args:
        out: fp32 [batch, query, heads, head_dim].
        lse: fp32 [batch, heads, query]; finite.
        block_out: as ``out``, any dtype.
        block_lse: as ``lse``; may be ``-inf``.
    """
    total = jnp.logaddexp(lse, block_lse)

    def weight(part: jax.Array) -> jax.Array:
        return jnp.swapaxes(jnp.exp(part - total), 1, 2)[..., None]

    return out * weight(lse) + block_out.astype(jnp.float32) * weight(block_lse), total
