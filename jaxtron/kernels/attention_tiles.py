"""A block kernel that leaves out what documents or a window hide, one tile after the other.

A fused kernel that reads its mask from a bias computes every score of a block, visible or not. Here
a block is cut in tiles of queries and keys, and the kernel runs on those in which a pair can be
visible; results are merged as those of blocks are. Which tiles these are is data: the loop over
them has as many turns as there are, so packed rows of short documents take time by the documents'
lengths, not by the row's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtron.kernels.attention_block import BlockKernel, BlockMask, merge
from jaxtron.layers.dropout import AttentionDropout

NOTHING = -1e30
"""A log-sum-exp below that of any visible key, and finite, as a merge needs."""


@dataclass(frozen=True)
class TiledBlockKernel:
    """The interface of :class:`jaxtron.kernels.attention_block.BlockKernel` around another kernel.

    Attributes:
        kernel: computes a tile, and whole blocks where order is all that counts.
        tile: queries, and keys, of a tile [tokens]; blocks that it does not divide are computed
            whole.
    """

    kernel: BlockKernel
    tile: int

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
        """Attend. A query that sees no key has the log-sum-exp :data:`NOTHING` and output 0."""
        if self._whole(q, k, mask, dropout):
            return self.kernel.forward(q, k, v, scale=scale, mask=mask, dropout=dropout)

        def add(total: Any, tile: _Tile) -> Any:
            out, lse = total
            part = self.kernel.forward(
                *(tile.queries(q), tile.keys(k), tile.keys(v)),
                scale=scale,
                mask=tile.mask(mask),
                dropout=None,
            )
            new_out, new_lse = merge(tile.queries(out), tile.queries(lse, 2), *part)
            return tile.put_queries(out, new_out), tile.put_queries(lse, new_lse, 2)

        lse = jnp.full((q.shape[0], q.shape[2], q.shape[1]), NOTHING, jnp.float32)
        out, lse = self._over_tiles(mask, add, (jnp.zeros(q.shape, jnp.float32), lse))
        return out.astype(q.dtype), lse

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
        """This block's share of ``(dq, dk, dv)``, fp32 where it was computed in tiles."""
        if self._whole(q, k, mask, dropout):
            return self.kernel.backward(
                q, k, v, out, lse, dout, scale=scale, mask=mask, dropout=dropout
            )

        def add(total: Any, tile: _Tile) -> Any:
            dq, dk, dv = total
            shares = self.kernel.backward(
                *(tile.queries(q), tile.keys(k), tile.keys(v)),
                *(tile.queries(out), tile.queries(lse, 2), tile.queries(dout)),
                scale=scale,
                mask=tile.mask(mask),
                dropout=None,
            )
            tile_dq, tile_dk, tile_dv = (x.astype(jnp.float32) for x in shares)
            return (
                tile.put_queries(dq, tile.queries(dq) + tile_dq),
                tile.put_keys(dk, tile.keys(dk) + tile_dk),
                tile.put_keys(dv, tile.keys(dv) + tile_dv),
            )

        start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        dq, dk, dv = self._over_tiles(mask, add, start)
        return dq, dk, dv

    def _whole(
        self, q: jax.Array, k: jax.Array, mask: BlockMask, dropout: AttentionDropout | None
    ) -> bool:
        lengths = (q.shape[1], k.shape[1])
        divides = all(length % self.tile == 0 for length in lengths)
        return mask.plain or dropout is not None or not divides or max(lengths) == self.tile

    def _over_tiles(self, mask: BlockMask, add: Callable[[Any, "_Tile"], Any], start: Any) -> Any:
        """``add`` for every tile in which a pair may be visible, beginning with ``start``."""
        size = self.tile
        queries, keys = (len(p) // size for p in (mask.query_positions, mask.key_positions))
        # with own keys both are in the order of positions: a later tile of keys is not visible
        pairs = np.array(
            [(i, j) for i in range(queries) for j in range(keys) if j <= i or not mask.own_keys],
            np.int32,
        )
        visible = jax.vmap(lambda pair: _Tile(size, pair[0], pair[1]).mask(mask).any_visible())(
            jnp.asarray(pairs)
        )
        order = jnp.asarray(pairs)[jnp.argsort(~visible, stable=True)]

        def turn(number: jax.Array, total: Any) -> Any:
            return add(total, _Tile(size, order[number, 0], order[number, 1]))

        return lax.fori_loop(0, jnp.sum(visible, dtype=jnp.int32), turn, start)


@dataclass(frozen=True)
class _Tile:
    """Slices of arrays for tile ``row`` of the queries and ``column`` of the keys."""

    size: int
    row: jax.Array
    column: jax.Array

    def queries(self, x: jax.Array, axis: int = 1) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, self.row * self.size, self.size, axis)

    def keys(self, x: jax.Array, axis: int = 1) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, self.column * self.size, self.size, axis)

    def put_queries(self, x: jax.Array, value: jax.Array, axis: int = 1) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, value, self.row * self.size, axis)

    def put_keys(self, x: jax.Array, value: jax.Array, axis: int = 1) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, value, self.column * self.size, axis)

    def mask(self, mask: BlockMask) -> BlockMask:
        segments = mask.query_segments, mask.key_segments
        return replace(
            mask,
            query_positions=self.queries(mask.query_positions, 0),
            key_positions=self.keys(mask.key_positions, 0),
            query_segments=None if segments[0] is None else self.queries(segments[0]),
            key_segments=None if segments[1] is None else self.keys(segments[1]),
        )
