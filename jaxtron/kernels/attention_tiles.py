"""A block kernel that leaves out what documents or a window hide, one tile after the other.

A fused kernel that reads its mask from a bias computes every score of a block, visible or not, and
takes twice as long as without one. Here each row of a block is cut in tiles of queries and keys.
Tiles in which nothing can be visible are left out, and those of which all is visible, or all up to
the diagonal, run without a bias; results are merged as those of blocks are. Which tiles these are
is data: the loops over them have as many turns as there are, so packed rows take time by the
documents' lengths, not by the row's.
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

        def add(total: Any, tile: _Tile, tile_mask: BlockMask) -> Any:
            out, lse = total
            operands = tile.queries(q), tile.keys(k), tile.keys(v)
            part = self.kernel.forward(*operands, scale=scale, mask=tile_mask, dropout=None)
            new_out, new_lse = merge(tile.queries(out), tile.queries(lse, 2), *part)
            return tile.put_queries(out, new_out), tile.put_queries(lse, new_lse, 2)

        lse = jnp.full((q.shape[0], q.shape[2], q.shape[1]), NOTHING, jnp.float32)
        out, lse = self._over_tiles(q, mask, add, (jnp.zeros(q.shape, jnp.float32), lse))
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

        def add(total: Any, tile: _Tile, tile_mask: BlockMask) -> Any:
            dq, dk, dv = total
            shares = self.kernel.backward(
                *(tile.queries(q), tile.keys(k), tile.keys(v)),
                *(tile.queries(out), tile.queries(lse, 2), tile.queries(dout)),
                scale=scale,
                mask=tile_mask,
                dropout=None,
            )
            tile_dq, tile_dk, tile_dv = (x.astype(jnp.float32) for x in shares)
            return (
                tile.put_queries(dq, tile.queries(dq) + tile_dq),
                tile.put_keys(dk, tile.keys(dk) + tile_dk),
                tile.put_keys(dv, tile.keys(dv) + tile_dv),
            )

        start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        dq, dk, dv = self._over_tiles(q, mask, add, start)
        return dq, dk, dv

    def _whole(
        self, q: jax.Array, k: jax.Array, mask: BlockMask, dropout: AttentionDropout | None
    ) -> bool:
        lengths = (q.shape[1], k.shape[1])
        divides = all(length % self.tile == 0 for length in lengths)
        return mask.plain or dropout is not None or not divides or max(lengths) == self.tile

    def _over_tiles(
        self,
        q: jax.Array,
        mask: BlockMask,
        add: Callable[[Any, "_Tile", BlockMask], Any],
        start: Any,
    ) -> Any:
        """``add(total, tile, its mask)`` for every tile that is needed, beginning with ``start``.

        Tiles of one kind, which are computed by one and the same kernel, follow each other.
        """
        total = start
        for own_keys, places in self._places(q.shape[0], mask):

            def mask_of(place: jax.Array, own_keys: bool = own_keys) -> BlockMask:
                return replace(_Tile(self.tile, *place).mask(mask), own_keys=own_keys)

            def with_mask(place: jax.Array, total: Any, mask_of: Any = mask_of) -> Any:
                return add(total, _Tile(self.tile, *place), mask_of(place))

            def by_order(place: jax.Array, total: Any, mask_of: Any = mask_of) -> Any:
                return add(total, _Tile(self.tile, *place), mask_of(place).by_order())

            some, all_ = jax.vmap(lambda p, f=mask_of: (f(p).any_visible(), f(p).all_visible()))(
                places
            )
            total = _loop(places, some & ~all_, with_mask, total)
            total = _loop(places, some & all_, by_order, total)
        return total

    def _places(self, rows: int, mask: BlockMask) -> list[tuple[bool, jax.Array]]:
        """Row and number among the queries and keys of each tile, int32 ``[tiles, 3]``.

        First of the tiles whose keys all come before their queries, then (True) of those whose keys
        are the queries' own.
        """
        queries, keys = (len(p) // self.tile for p in (mask.query_positions, mask.key_positions))
        every = np.array(list(np.ndindex(rows, queries, keys)), np.int32)
        if not mask.own_keys:
            return [(False, jnp.asarray(every))]
        # both are in the order of positions: a later tile of keys is not visible
        before, own = every[every[:, 1] > every[:, 2]], every[every[:, 1] == every[:, 2]]
        return [(False, jnp.asarray(before)), (True, jnp.asarray(own))]


def _loop(
    places: jax.Array, chosen: jax.Array, body: Callable[[jax.Array, Any], Any], total: Any
) -> Any:
    """``body(place, total)`` of the chosen among ``places [n, 3]``."""
    order = places[jnp.argsort(~chosen, stable=True)]
    turns = jnp.sum(chosen, dtype=jnp.int32)
    return lax.fori_loop(0, turns, lambda number, total: body(order[number], total), total)


@dataclass(frozen=True)
class _Tile:
    """Slices of arrays ``[batch, ...]``: one row, one tile of the queries and one of the keys."""

    size: int
    row: jax.Array
    query: jax.Array
    key: jax.Array

    def queries(self, x: jax.Array, axis: int = 1) -> jax.Array:
        return self._take(x, self.query, axis)

    def keys(self, x: jax.Array, axis: int = 1) -> jax.Array:
        return self._take(x, self.key, axis)

    def put_queries(self, x: jax.Array, value: jax.Array, axis: int = 1) -> jax.Array:
        return lax.dynamic_update_slice(x, value, self._start(x, self.query, axis))

    def put_keys(self, x: jax.Array, value: jax.Array, axis: int = 1) -> jax.Array:
        return lax.dynamic_update_slice(x, value, self._start(x, self.key, axis))

    def mask(self, mask: BlockMask) -> BlockMask:
        segments = mask.query_segments, mask.key_segments
        return replace(
            mask,
            query_positions=self._positions(mask.query_positions, self.query),
            key_positions=self._positions(mask.key_positions, self.key),
            query_segments=None if segments[0] is None else self.queries(segments[0]),
            key_segments=None if segments[1] is None else self.keys(segments[1]),
        )

    def _start(self, x: jax.Array, number: jax.Array, axis: int) -> list[jax.Array | int]:
        start: list[jax.Array | int] = [self.row, *[0] * (x.ndim - 1)]
        start[axis] = number * self.size
        return start

    def _take(self, x: jax.Array, number: jax.Array, axis: int) -> jax.Array:
        shape = [1, *x.shape[1:]]
        shape[axis] = self.size
        return lax.dynamic_slice(x, self._start(x, number, axis), shape)

    def _positions(self, positions: jax.Array, number: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(positions, number * self.size, self.size)
