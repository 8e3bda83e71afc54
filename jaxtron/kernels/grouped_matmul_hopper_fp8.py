"""Hopper kernels of grouped products of FP8 operands (Pallas, Mosaic GPU).

Rows lie as in ``grouped_matmul_hopper.py``. Tensor cores take FP8 operands only with the summed
dimension last, and add up FP8 products with few bits: of a sum of 28672 positive products a quarter
was lost. So every step's sum goes to fp32 registers, from which the tile is scaled and written. Two
sums need twice the registers, hence tiles half as wide as those of bf16.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtron.kernels.grouped_matmul_hopper import (
    COLUMN_TILE,
    CONSUMERS,
    ROW_TILE,
    Matmul,
    in_bands,
    kernel_of,
    plgpu_module,
    share,
    tile_groups,
)

DEPTH = 128  # of a step along the summed dimension: one swizzled line of FP8
BLOCK = (ROW_TILE, DEPTH)
HALF = ROW_TILE // CONSUMERS


def _along(step: Any) -> tuple[int, Any]:
    return 0, step


def _multiply(accumulator: Any, a: Any, b: Any, warpgroup: Any) -> None:
    own = a.at[pl.ds(warpgroup * HALF, HALF)]
    plgpu_module().wgmma(accumulator, own, b.transpose((1, 0)))


class _Fp8Matmul(Matmul):
    """Tiles ``scale * a b^T`` with a sum of its own for every step."""

    bits = 8

    def __init__(self, scale: Any) -> None:
        super().__init__(
            tile=(ROW_TILE, COLUMN_TILE),
            split=0,
            blocks=(BLOCK, BLOCK),
            maps=(_along, _along),
            multiply=_multiply,
        )
        self.scale = scale

    def product(self, allocations: Any, slots: Any, a: Any, b: Any, out: Any, steps: Any) -> None:
        plgpu = plgpu_module()
        warpgroup = lax.axis_index("wg")

        def context(evaluate: Callable[[Any], Any]) -> None:
            total = evaluate(jnp.zeros(self.part, jnp.float32)) * self.scale[0]
            self.store(total.astype(jnp.bfloat16), slots, out, warpgroup)

        def step(_: Any, a_block: Any, b_block: Any, total: Any) -> Any:
            def one(accumulator: Any) -> Any:
                self.multiply(accumulator, a_block, b_block, warpgroup)
                plgpu.wgmma_wait(0)
                return accumulator[...]

            return total + pl.run_scoped(one, plgpu.ACC(self.part, jnp.float32))

        self.pipeline(steps, step, context)(a, b, allocations=allocations)


@functools.partial(jax.jit, static_argnames=("blocks",))
def rows_times_weights(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, scale: jax.Array, *, blocks: int
) -> jax.Array:
    """``scale * rows[m] @ weights[group of m].T``.

    Args:
        rows: FP8 ``[M, K]``, groups aligned to ``ROW_TILE``.
        weights: FP8 ``[groups, N, K]``.
        sizes: int32 ``[groups]``, rows of each group.
        scale: fp32 scalar.
        blocks: thread blocks, one a multiprocessor.

    Returns:
        bf16 ``[M, N]``; anything in tiles behind the last group.
    """
    count, depth = rows.shape
    width = weights.shape[1]
    columns = width // COLUMN_TILE

    def grouped_gemm_fp8(
        groups: Any, used: Any, scale: Any, rows: Any, weights: Any, out: Any
    ) -> None:
        def tiles(product: Any) -> None:
            in_use = used[0]

            def one(i: jax.Array, _: None) -> None:
                index = lax.axis_index("sm") + i * blocks
                row, column = in_bands(index, in_use, columns)
                where = pl.ds(row * ROW_TILE, ROW_TILE)
                across = pl.ds(column * COLUMN_TILE, COLUMN_TILE)
                product(
                    rows.at[where, :],
                    weights.at[groups[row]].at[across, :],
                    out.at[where, across],
                    depth // DEPTH,
                )

            lax.fori_loop(0, share(in_use * columns, blocks), one, None)

        _Fp8Matmul(scale).scope(rows, weights.at[0], tiles)

    kernel = kernel_of(grouped_gemm_fp8, jax.ShapeDtypeStruct((count, width), jnp.bfloat16), blocks)
    groups, used = tile_groups(sizes, count // ROW_TILE)
    result: jax.Array = kernel(groups, used, scale.reshape(1), rows, weights)
    return result


@functools.partial(jax.jit, static_argnames=("blocks",))
def rows_times_rows(
    a: jax.Array, b: jax.Array, sizes: jax.Array, scale: jax.Array, *, blocks: int
) -> jax.Array:
    """``out[group] = scale * a[:, rows of group] @ b[:, rows of group].T``.

    Args:
        a: FP8 ``[K, M]``, groups aligned to ``ROW_TILE``, filled up with zeros.
        b: FP8 ``[N, M]``.
        sizes: int32 ``[groups]``, rows of each group.
        scale: fp32 scalar.
        blocks: thread blocks, one a multiprocessor.

    Returns:
        bf16 ``[groups, K, N]``; zero for an empty group.
    """
    down, columns = a.shape[0] // ROW_TILE, b.shape[0] // COLUMN_TILE
    groups = sizes.shape[0]

    def grouped_gemm_fp8_of_rows(
        starts: Any, steps: Any, scale: Any, a: Any, b: Any, out: Any
    ) -> None:
        def tiles(product: Any) -> None:
            def one(i: jax.Array, _: None) -> None:
                index = lax.axis_index("sm") + i * blocks
                group = index // (down * columns)
                row, column = in_bands(lax.rem(index, down * columns), down, columns)
                # only the first `steps` blocks of the slice are read, so it may end behind M
                rows = pl.ds(pl.multiple_of(starts[group], ROW_TILE), a.shape[1])
                where = pl.ds(row * ROW_TILE, ROW_TILE)
                across = pl.ds(column * COLUMN_TILE, COLUMN_TILE)
                product(
                    a.at[where, rows],
                    b.at[across, rows],
                    out.at[group].at[where, across],
                    steps[group],
                )

            lax.fori_loop(0, share(groups * down * columns, blocks), one, None)

        _Fp8Matmul(scale).scope(a, b, tiles)

    steps = (sizes + ROW_TILE - 1) // ROW_TILE
    starts = (jnp.cumsum(steps) - steps) * ROW_TILE
    shape = jax.ShapeDtypeStruct((groups, a.shape[0], b.shape[0]), jnp.bfloat16)
    kernel = kernel_of(grouped_gemm_fp8_of_rows, shape, blocks)
    operands = starts.astype(jnp.int32), steps.astype(jnp.int32), scale.reshape(1), a, b
    result: jax.Array = kernel(*operands)
    return result
