"""Hopper kernels of grouped matrix products over rows in whole tiles (Pallas, Mosaic GPU).

Every group of rows begins at a multiple of :data:`ROW_TILE` and its last tile is filled up with
zero rows. So each tile belongs to one group, no store needs a mask, and products of the filling are
zero by themselves. Tiles behind the last group are neither read nor written: work follows the
routing, not the size of the buffer.

Kernels are traced and lowered once for all layers (``jax.jit``): it takes seconds each.

A thread block stays on its multiprocessor and takes one output tile after the other. One warpgroup
copies operands to shared memory (TMA), two multiply (``wgmma``), each a half of the tile.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

ROW_TILE = 128
"""Rows of a tile; groups begin at its multiples."""
COLUMN_TILE = 128
"""Widths must be multiples of this; tiles are twice as wide where the width allows it."""
DEPTH = 64  # of a step along the contracted dimension: one swizzled line of bf16
STAGES = 4  # steps in shared memory at a time
SLOTS = 2  # pieces of a warpgroup's result there at a time
EPILOGUE = 64  # rows that leave registers at once
LINE = 128  # bytes of a row of them: one swizzled line
CONSUMERS = 2  # warpgroups that multiply
BAND = 8  # tiles of rows that are worked on side by side, so that weights stay in the L2 cache


def plgpu_module() -> Any:
    """Pallas for GPUs, imported where it is used: it needs a GPU build of JAX."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def multiprocessors() -> int:
    """Multiprocessors of the GPU."""
    return int(jax.devices()[0].core_count)


def tile_groups(sizes: jax.Array, tiles: int) -> tuple[jax.Array, jax.Array]:
    """Group of every tile of rows, int32 ``[tiles]``, and the number of tiles in use ``[1]``."""
    ends = jnp.cumsum((sizes + ROW_TILE - 1) // ROW_TILE)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    return jnp.minimum(group, sizes.shape[0] - 1), ends[-1:].astype(jnp.int32)


def _column_tile(width: int) -> int:
    return 2 * COLUMN_TILE if width % (2 * COLUMN_TILE) == 0 else COLUMN_TILE


def in_bands(index: jax.Array, rows: Any, columns: int) -> tuple[jax.Array, jax.Array]:
    """Row and column of the ``index``-th tile: bands of rows, column by column within a band."""
    band = index // (BAND * columns)
    height = jnp.minimum(rows - band * BAND, BAND)
    within = index - band * (BAND * columns)
    return band * BAND + lax.rem(within, height), within // height


def smem_transforms(width: int, bits: int) -> Any:
    """How rows of ``width`` numbers of ``bits`` lie in shared memory for TMA and ``wgmma``."""
    plgpu = plgpu_module()
    swizzle = plgpu.find_swizzle(width * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


class Matmul:
    """One output tile after the other; what both kernels share.

    Args:
        tile: rows and columns of an output tile.
        split: dimension of the tile that the two warpgroups share.
        blocks: shapes of a step's operands.
        maps: their index maps.
        multiply: ``(accumulator, a, b, warpgroup)``.
        adds: the product is added to what stands there, in fp32; otherwise it is written in bf16.
    """

    bits = 16  # of an operand's number

    def __init__(
        self,
        tile: tuple[int, int],
        split: int,
        blocks: tuple[tuple[int, int], tuple[int, int]],
        maps: tuple[Callable[..., Any], Callable[..., Any]],
        multiply: Callable[..., None],
        adds: bool = False,
    ) -> None:
        self.tile, self.split, self.blocks, self.maps = tile, split, blocks, maps
        self.part = tuple(n // CONSUMERS if d == split else n for d, n in enumerate(tile))
        self.multiply = multiply
        self.adds = adds
        self.dtype = jnp.dtype(jnp.float32 if adds else jnp.bfloat16)
        self.piece = EPILOGUE, LINE // self.dtype.itemsize

    def pipeline(self, steps: Any, body: Any, context: Any) -> Any:
        """``body`` for ``steps`` blocks of the operands, which one warpgroup copies ahead."""
        plgpu = plgpu_module()
        specs = [
            plgpu.BlockSpec(
                block,
                index,
                transforms=smem_transforms(block[1], self.bits),
                memory_space=plgpu.SMEM,
            )
            for block, index in zip(self.blocks, self.maps, strict=True)
        ]
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(steps,),
            memory_registers=40,
            in_specs=specs,
            wg_axis="wg",
            num_compute_wgs=CONSUMERS,
            max_concurrent_steps=STAGES,
            compute_context=context,
        )

    def scope(self, a: Any, b: Any, body: Callable[[Any], None]) -> None:
        """Run ``body(product)`` with shared memory for ``product(a, b, out, steps)``."""
        plgpu = plgpu_module()
        nothing = lambda *_, **__: None  # noqa: E731
        allocations = self.pipeline(STAGES, nothing, nothing).get_allocations(a, b)
        lines = smem_transforms(self.piece[1], 8 * self.dtype.itemsize)
        slots = plgpu.SMEM((CONSUMERS, SLOTS, *self.piece), self.dtype, transforms=lines)

        def run(allocations: Any, slots: Any) -> None:
            body(functools.partial(self.product, allocations, slots))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(run, allocations=allocations, slots=slots, collective_axes="wg")

    def product(self, allocations: Any, slots: Any, a: Any, b: Any, out: Any, steps: Any) -> None:
        """``out`` (a tile in global memory) from ``steps`` blocks of ``a`` and ``b``."""
        plgpu = plgpu_module()
        warpgroup = lax.axis_index("wg")

        def context(evaluate: Callable[[Any], Any]) -> None:
            def accumulated(accumulator: Any) -> None:
                evaluate(accumulator)
                self.store(accumulator[...].astype(self.dtype), slots, out, warpgroup)

            pl.run_scoped(accumulated, plgpu.ACC(self.part, jnp.float32))

        def step(_: Any, a_block: Any, b_block: Any, accumulator: Any) -> Any:
            self.multiply(accumulator, a_block, b_block, warpgroup)
            plgpu.wgmma_wait(0)
            return accumulator

        self.pipeline(steps, step, context)(a, b, allocations=allocations)

    def store(self, values: Any, slots: Any, out: Any, warpgroup: Any) -> None:
        """Write or add a warpgroup's part of the tile through slots of shared memory."""
        plgpu = plgpu_module()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        first = [warpgroup * n if d == self.split else 0 for d, n in enumerate(self.part)]
        rows, columns = self.piece
        pieces = [
            (i, j) for i in range(0, self.part[0], rows) for j in range(0, self.part[1], columns)
        ]
        for number, (i, j) in enumerate(pieces):
            slot = slots.at[warpgroup, number % SLOTS]
            plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
            slot[...] = values[i : i + rows, j : j + columns]
            plgpu.commit_smem()
            where = pl.ds(first[0] + i, rows), pl.ds(first[1] + j, columns)
            plgpu.copy_smem_to_gmem(slot, out.at[where], reduction_op="add" if self.adds else None)


def kernel_of(body: Any, shape: Any, blocks: int) -> Any:
    """``body`` as a kernel, which profiles show under its name."""
    plgpu = plgpu_module()
    return plgpu.kernel(
        body,
        out_type=shape,
        grid=(blocks,),
        grid_names=("sm",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def share(total: Any, blocks: int) -> Any:
    """How many of ``total`` tiles this thread block takes, beginning with its own number."""
    return (total - lax.axis_index("sm") + blocks - 1) // blocks


@functools.partial(jax.jit, static_argnames=("transposed", "blocks"))
def rows_times_weights(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool, blocks: int
) -> jax.Array:
    """``out[m] = rows[m] @ weights[group of m]``, or with the transposed weight.

    Args:
        rows: bf16 ``[M, K]``, groups aligned to :data:`ROW_TILE`.
        weights: bf16 ``[groups, K, N]``; transposed: ``[groups, N, K]``.
        sizes: int32 ``[groups]``, rows of each group.
        transposed: see above.
        blocks: thread blocks, one a multiprocessor.

    Returns:
        bf16 ``[M, N]``; anything in tiles behind the last group.
    """
    plgpu = plgpu_module()
    count, depth = rows.shape
    width = weights.shape[1] if transposed else weights.shape[2]
    column_tile = _column_tile(width)
    columns = width // column_tile
    half = ROW_TILE // CONSUMERS

    def multiply(accumulator: Any, a: Any, b: Any, warpgroup: Any) -> None:
        own = a.at[pl.ds(warpgroup * half, half)]
        plgpu.wgmma(accumulator, own, b.transpose((1, 0)) if transposed else b)

    matmul = Matmul(
        tile=(ROW_TILE, column_tile),
        split=0,
        blocks=((ROW_TILE, DEPTH), (column_tile, DEPTH) if transposed else (DEPTH, column_tile)),
        maps=(lambda k: (0, k), (lambda k: (0, k)) if transposed else (lambda k: (k, 0))),
        multiply=multiply,
    )

    def grouped_gemm(groups: Any, used: Any, rows: Any, weights: Any, out: Any) -> None:
        def tiles(product: Any) -> None:
            in_use = used[0]

            def one(i: jax.Array, _: None) -> None:
                index = lax.axis_index("sm") + i * blocks
                row, column = in_bands(index, in_use, columns)
                where = pl.ds(row * ROW_TILE, ROW_TILE)
                across = pl.ds(column * column_tile, column_tile)
                weight = weights.at[groups[row]]
                product(
                    rows.at[where, :],
                    weight.at[across, :] if transposed else weight.at[:, across],
                    out.at[where, across],
                    depth // DEPTH,
                )

            lax.fori_loop(0, share(in_use * columns, blocks), one, None)

        matmul.scope(rows, weights.at[0], tiles)

    kernel = kernel_of(grouped_gemm, jax.ShapeDtypeStruct((count, width), rows.dtype), blocks)
    result: jax.Array = kernel(*tile_groups(sizes, count // ROW_TILE), rows, weights)
    return result


@functools.partial(jax.jit, static_argnames=("blocks",))
def rows_times_rows(
    a: jax.Array, b: jax.Array, sizes: jax.Array, total: jax.Array | None = None, *, blocks: int
) -> jax.Array:
    """``out[group] = a[rows of group].T @ b[rows of group]``; zero for an empty group.

    Args:
        a: bf16 ``[M, K]``, groups aligned to :data:`ROW_TILE`, filled up with zero rows.
        b: bf16 ``[M, N]``.
        sizes: int32 ``[groups]``, rows of each group.
        total: fp32 ``[groups, K, N]``, to which the product is added unrounded, in place where
            nobody else reads it.
        blocks: thread blocks, one a multiprocessor.

    Returns:
        bf16 ``[groups, K, N]``, or the sum in fp32.
    """
    plgpu = plgpu_module()
    width_a, width_b = a.shape[1], b.shape[1]
    column_tile = _column_tile(width_b)
    down, columns = width_a // COLUMN_TILE, width_b // column_tile
    half = column_tile // CONSUMERS
    groups = sizes.shape[0]

    def multiply(accumulator: Any, a: Any, b: Any, warpgroup: Any) -> None:
        own = b.at[:, pl.ds(warpgroup * half, half)]
        plgpu.wgmma(accumulator, a.transpose((1, 0)), own)

    matmul = Matmul(
        tile=(COLUMN_TILE, column_tile),
        split=1,
        blocks=((DEPTH, COLUMN_TILE), (DEPTH, column_tile)),
        maps=(lambda k: (k, 0), lambda k: (k, 0)),
        multiply=multiply,
        adds=total is not None,
    )

    def grouped_gemm_of_rows(starts: Any, steps: Any, a: Any, b: Any, out: Any) -> None:
        def tiles(product: Any) -> None:
            def one(i: jax.Array, _: None) -> None:
                index = lax.axis_index("sm") + i * blocks
                group = index // (down * columns)
                row, column = in_bands(lax.rem(index, down * columns), down, columns)
                # only the first `steps` blocks of the slice are read, so it may end behind M
                rows = pl.ds(pl.multiple_of(starts[group], ROW_TILE), a.shape[0])
                where = pl.ds(row * COLUMN_TILE, COLUMN_TILE)
                across = pl.ds(column * column_tile, column_tile)

                def tile() -> None:
                    product(
                        a.at[rows, where],
                        b.at[rows, across],
                        out.at[group].at[where, across],
                        steps[group],
                    )

                pl.when(total is None or steps[group] > 0)(tile)

            lax.fori_loop(0, share(groups * down * columns, blocks), one, None)

        matmul.scope(a, b, tiles)

    tiles = (sizes + ROW_TILE - 1) // ROW_TILE
    starts = (jnp.cumsum(tiles) - tiles) * ROW_TILE
    steps = (sizes + DEPTH - 1) // DEPTH
    operands = starts.astype(jnp.int32), steps.astype(jnp.int32), a, b
    result: jax.Array
    if total is None:
        shape = jax.ShapeDtypeStruct((groups, width_a, width_b), a.dtype)
        result = kernel_of(grouped_gemm_of_rows, shape, blocks)(*operands)
    else:
        sums = jax.new_ref(total)
        kernel_of(grouped_gemm_of_rows, (), blocks)(*operands, sums)
        result = jax.freeze(sums)
    return result
