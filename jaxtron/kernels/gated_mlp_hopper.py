"""Hopper kernels of the MLP: products that apply SwiGLU, or its derivative, on the way out.

Pallas, Mosaic GPU. Thread blocks stay on their multiprocessors and take one output tile after the
other. One warpgroup copies operands to a ring in shared memory (TMA), two multiply (``wgmma``), 64
rows each and all 256 columns of a tile, which reads shared memory the least. The blocks of a
cluster take tiles below one another: each loads a part of the right operand for all of them. The
copies for the next tile begin while the results of this one leave.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtron.kernels.grouped_matmul_hopper import plgpu_module

ROWS = 128  # of a tile
COLUMNS = 256  # of a tile: of a gated product 128 of the gate and the same 128 of the other half
HALF = COLUMNS // 2
DEPTH = 64  # of a step along the contracted dimension: one swizzled line of bf16
CONSUMERS = 2  # warpgroups that multiply
PART = ROWS // CONSUMERS  # rows of a warpgroup
PIECE = 64  # columns that leave registers at once
CLUSTER = 2  # thread blocks that share a load of the right operand
STAGES = 4  # steps in shared memory at a time
SLOTS = 2  # pieces of a warpgroup's result in shared memory at a time
AHEAD = 1  # steps whose products may be unfinished when the next is issued
ROWS_AT_ONCE = ROWS * CLUSTER
BAND = 8  # rows of clusters' tiles that are worked on side by side; they stay in the L2 cache
LOG2_E = 1.4426950408889634

Copies = list[tuple[Any, Any]]  # source in global memory, destination in shared memory


def _position(index: Any, rows: int, columns: int, band: int) -> tuple[Any, Any]:
    """Row and column of the ``index``-th tile: bands of rows, to and fro along the columns."""
    number = index // (band * columns)
    height = jnp.minimum(rows - number * band, band)
    within = index - number * (band * columns)
    column = within // height
    back = lax.rem(number, 2) == 1
    return number * band + lax.rem(within, height), jnp.where(back, columns - 1 - column, column)


def _sigmoid(x: jax.Array) -> jax.Array:
    """``1 / (1 + exp(-x))`` without a division, which takes many instructions."""
    root = lax.rsqrt(1 + jnp.exp2(x * -LOG2_E))
    return root * root


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return gate * _sigmoid(gate) * up


@dataclasses.dataclass(frozen=True)
class Product:
    """A tile of ``x @ right`` after the other.

    Attributes:
        name: of the kernel, in profiles.
        columns: tiles of columns.
        right: shapes of the right operand's blocks in a step: ``[DEPTH, n]`` each, or transposed
            ``[n, DEPTH]``. Each has its accumulator.
        transposed: see there.
        loads: copies of the right operand in a step (and of an extra step, less one).
        copies: ``(arrays, blocks, column, depth)``: the right operand's copies of a step, shared by
            a cluster.
        finish: ``(accumulators, tile)`` writes a warpgroup's part of the tile.
        extra: steps after those of a tile, with data for ``finish``.
        extra_copies: their copies, ``(arrays, blocks, row, column, number)``: ``loads + 1``.
    """

    name: str
    columns: int
    right: Sequence[tuple[int, int]]
    transposed: bool
    loads: int
    copies: Callable[..., Copies]
    finish: Callable[[Sequence[Any], "Tile"], None]
    extra: int = 0
    extra_copies: Callable[..., Copies] | None = None


@dataclasses.dataclass(frozen=True)
class Tile:
    """What ``finish`` writes to, and the steps behind the products.

    Attributes:
        row: the first of the warpgroup's rows.
        column: the tile's.
        warpgroup: 0 or 1.
        outs: results in global memory.
        slots: shared memory for pieces of ``[PART, PIECE]``.
        wait: ``(number) -> blocks`` of an extra step.
        release: ``(number)``: gives them back.
    """

    row: Any
    column: Any
    warpgroup: Any
    outs: Sequence[Any]
    slots: Any
    wait: Callable[[int], Sequence[Any]]
    release: Callable[[int], None]


def _run(product: Product, x: jax.Array, arrays: Sequence[jax.Array], out: Any, blocks: int) -> Any:
    """The kernel's results ``out`` for the left operand ``x [M, K]`` and other ``arrays``."""
    plgpu = plgpu_module()
    count, depth = x.shape
    if count % ROWS_AT_ONCE or depth % DEPTH or depth < DEPTH * STAGES:
        raise ValueError(
            f"{product.name}: x {x.shape} must have a multiple of {ROWS_AT_ONCE} rows and of "
            f"{DEPTH} columns, at least {DEPTH * STAGES}"
        )
    steps = depth // DEPTH
    every = steps + product.extra
    units, rows = blocks // CLUSTER, count // ROWS_AT_ONCE
    widths = [n[0] if product.transposed else n[1] for n in product.right]
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    def kernel(x: Any, *refs: Any) -> None:
        arrays_, outs = refs[: len(arrays)], refs[len(arrays) :]
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        unit = lax.axis_index("unit")
        mine = (rows * product.columns - unit + units - 1) // units

        def each_tile(body: Callable[..., None]) -> None:
            """``body(row, column, first step)`` of each tile of this thread block."""

            def one(i: Any, _: None) -> None:
                row, column = _position(unit + i * units, rows, product.columns, BAND)
                body(row * CLUSTER + block, column, i * every)

            lax.fori_loop(0, mine, one, None)

        def scope(a: Any, b: Sequence[Any], slots: Any, full: Any, empty: Any) -> None:
            def at(slot: Any) -> list[Any]:
                return [ref.at[slot] for ref in b]

            def load() -> None:
                plgpu.set_max_registers(40, action="decrease")

                def copy(copies: Copies, slot: Any, axes: Any = None) -> None:
                    for source, destination in copies:
                        plgpu.copy_gmem_to_smem(
                            source, destination, full.at[slot], collective_axes=axes
                        )

                def free(step: Any) -> Any:
                    """The slot of a step, once nobody needs what it held before."""
                    slot = lax.rem(step, STAGES)
                    pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    return slot

                def tile(row: Any, column: Any, first: Any) -> None:
                    def one(k: Any, _: None) -> None:
                        slot = free(first + k)
                        within = pl.ds(k * DEPTH, DEPTH)
                        copy([(x.at[pl.ds(row * ROWS, ROWS), within], a.at[slot])], slot)
                        copy(product.copies(arrays_, at(slot), column, within), slot, ("block",))

                    lax.fori_loop(0, steps, one, None)
                    for number in range(product.extra):
                        slot = free(first + steps + number)
                        assert product.extra_copies is not None
                        copy(product.extra_copies(arrays_, at(slot), row, column, number), slot)

                each_tile(tile)

                # no block may leave while another of its cluster still copies or signals to it
                def drain(step: Any, _: None) -> None:
                    plgpu.barrier_wait(empty.at[lax.rem(step, STAGES)])

                total = mine * every
                lax.fori_loop(jnp.maximum(total - STAGES, 0), total, drain, None)

            def multiply() -> None:
                plgpu.set_max_registers(232, action="increase")

                def tile(row: Any, column: Any, first: Any) -> None:
                    def slot_of(step: Any) -> Any:
                        return lax.rem(first + step, STAGES)

                    def release(step: Any, predicate: Any = None) -> None:
                        plgpu.barrier_arrive(empty.at[slot_of(step)], predicate=predicate)

                    def wait(number: int) -> list[Any]:
                        plgpu.barrier_wait(full.at[slot_of(steps + number)])
                        return at(slot_of(steps + number))

                    def accumulate(*accumulators: Any) -> None:
                        def one(k: Any, _: None) -> None:
                            slot = slot_of(k)
                            plgpu.barrier_wait(full.at[slot])
                            own = a.at[slot, pl.ds(warpgroup * PART, PART)]
                            for accumulator, right in zip(accumulators, at(slot), strict=True):
                                turned = right.transpose((1, 0)) if product.transposed else right
                                plgpu.wgmma(accumulator, own, turned)
                            plgpu.wgmma_wait(AHEAD * len(b))
                            # adding the stages keeps what is divided positive
                            release(k + STAGES - AHEAD, k >= AHEAD)

                        lax.fori_loop(0, steps, one, None)
                        plgpu.wgmma_wait(0)
                        for k in range(steps - AHEAD, steps):
                            release(k)
                        here = Tile(
                            row * ROWS + warpgroup * PART,
                            column,
                            warpgroup,
                            outs,
                            slots.at[warpgroup],
                            wait,
                            lambda number: release(steps + number),
                        )
                        product.finish(accumulators, here)

                    pl.run_scoped(accumulate, *(plgpu.ACC((PART, n), jnp.float32) for n in widths))

                each_tile(tile)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            lax.cond(warpgroup == CONSUMERS, load, multiply)

        def ring(*shape: int) -> Any:
            return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

        empty = plgpu.ClusterBarrier(
            collective_axes=("block",), num_arrivals=CONSUMERS, num_barriers=STAGES
        )
        pl.run_scoped(
            scope,
            a=ring(STAGES, ROWS, DEPTH),
            b=[ring(STAGES, *shape) for shape in product.right],
            slots=ring(CONSUMERS, SLOTS, PART, PIECE),
            full=plgpu.Barrier(num_arrivals=1 + product.loads, num_barriers=STAGES),
            empty=empty,
            collective_axes="warpgroup",
        )

    kernel.__name__ = product.name
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(units,),
        grid_names=("unit",),
        cluster=(CLUSTER,),
        cluster_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(x, *arrays)


def _store(pieces: Sequence[tuple[Callable[[], Any], Any]], tile: Tile) -> None:
    """Write ``(value, place)`` through the slots of shared memory, one after the other."""
    plgpu = plgpu_module()
    count = tile.slots.shape[0]
    for number, (value, place) in enumerate(pieces):
        slot = tile.slots.at[number % count]
        plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
        slot[...] = value().astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, place)


@functools.partial(jax.jit, static_argnames=("blocks",))
def gate_up(x: jax.Array, w: jax.Array, *, blocks: int) -> tuple[jax.Array, jax.Array]:
    """Gate and up projection ``u = x w`` and ``silu(gate) * up`` of the rounded ``u``.

    Args:
        x: bf16 ``[M, h]``.
        w: bf16 ``[h, 2, F]``; index 0 is the gate.
        blocks: thread blocks, one a multiprocessor.

    Returns:
        bf16 ``[M, 2, F]`` and ``[M, F]``.
    """
    count, depth = x.shape
    width = w.shape[2]

    def copies(arrays: Any, blocks: Any, column: Any, depth: Any) -> Copies:
        of_gate, of_up = (pl.ds(part * width + column * HALF, HALF) for part in range(2))
        return [
            (arrays[0].at[depth, across], block)
            for across, block in zip((of_gate, of_up), blocks, strict=True)
        ]

    def finish(accumulators: Any, tile: Tile) -> None:
        # the activation reads what it would read from memory
        gate, up = (accumulator[...].astype(jnp.bfloat16) for accumulator in accumulators)
        u, act = tile.outs
        rows, pieces = pl.ds(tile.row, PART), []
        for j in range(0, HALF, PIECE):
            of_gate, of_up = gate[:, j : j + PIECE], up[:, j : j + PIECE]
            at = tile.column * HALF + j
            pieces += [
                (functools.partial(jnp.asarray, of_gate), u.at[rows, pl.ds(at, PIECE)]),
                (functools.partial(jnp.asarray, of_up), u.at[rows, pl.ds(width + at, PIECE)]),
                (functools.partial(_gated, of_gate, of_up), act.at[rows, pl.ds(at, PIECE)]),
            ]
        _store(pieces, tile)

    product = Product(
        name="gemm_gate_up",
        columns=_tiles(width, HALF),
        right=[(DEPTH, HALF)] * 2,
        transposed=False,
        loads=2,
        copies=copies,
        finish=finish,
    )
    out = [jax.ShapeDtypeStruct((count, n * width), x.dtype) for n in (2, 1)]
    u, act = _run(product, x, [w.reshape(depth, 2 * width)], out, blocks)
    return u.reshape(count, 2, width), act


@functools.partial(jax.jit, static_argnames=("blocks",))
def d_gate_up(d_out: jax.Array, w: jax.Array, u: jax.Array, *, blocks: int) -> jax.Array:
    """Gradient of ``u``, gate and up: of ``silu(gate) * up`` for its gradient ``d_out @ w.T``.

    Args:
        d_out: bf16 ``[M, h]``.
        w: bf16 ``[F, h]``, the down projection.
        u: bf16 ``[M, 2, F]``.
        blocks: thread blocks, one a multiprocessor.

    Returns:
        bf16 ``[M, 2, F]``; the product is not rounded in between.
    """
    plgpu = plgpu_module()
    count, _, width = u.shape
    number_of_pieces = COLUMNS // PIECE

    def copies(arrays: Any, blocks: Any, column: Any, depth: Any) -> Copies:
        return [(arrays[0].at[pl.ds(column * COLUMNS, COLUMNS), depth], blocks[0])]

    def places(array: Any, row: Any, rows: int, column: Any, number: int) -> list[Any]:
        first = column * COLUMNS + number * PIECE
        return [array.at[pl.ds(row, rows), pl.ds(part * width + first, PIECE)] for part in range(2)]

    def extra_copies(arrays: Any, blocks: Any, row: Any, column: Any, number: int) -> Copies:
        (block,) = blocks
        sources = places(arrays[1], row * ROWS, ROWS, column, number)
        return [(source, block.at[pl.ds(n * ROWS, ROWS)]) for n, source in enumerate(sources)]

    def finish(accumulators: Any, tile: Tile) -> None:
        values = accumulators[0][...]
        for number in range(number_of_pieces):
            (block,) = tile.wait(number)
            of_gate, of_up = (
                block.at[pl.ds(n * ROWS + tile.warpgroup * PART, PART)] for n in range(2)
            )
            gate, up = of_gate[...].astype(jnp.float32), of_up[...].astype(jnp.float32)
            g = values[:, number * PIECE : (number + 1) * PIECE]
            sigmoid = _sigmoid(gate)
            act = gate * sigmoid
            # results leave from where gate and up came to
            of_gate[...] = (g * up * (sigmoid + act - act * sigmoid)).astype(jnp.bfloat16)
            of_up[...] = (g * act).astype(jnp.bfloat16)
            plgpu.commit_smem()
            to_gate, to_up = places(tile.outs[0], tile.row, PART, tile.column, number)
            plgpu.copy_smem_to_gmem(of_gate, to_gate, commit_group=False)
            plgpu.copy_smem_to_gmem(of_up, to_up)
            if number > 0:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                tile.release(number - 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile.release(number_of_pieces - 1)

    product = Product(
        name="gemm_d_gate_up",
        columns=_tiles(width, COLUMNS),
        right=[(COLUMNS, DEPTH)],
        transposed=True,
        loads=1,
        copies=copies,
        finish=finish,
        extra=number_of_pieces,
        extra_copies=extra_copies,
    )
    out = jax.ShapeDtypeStruct((count, 2 * width), u.dtype)
    result: jax.Array = _run(product, d_out, [w, u.reshape(count, 2 * width)], out, blocks)
    return result.reshape(u.shape)


def _tiles(width: int, of: int) -> int:
    if width % of:
        raise ValueError(f"the products' width {width} must be a multiple of {of}")
    return width // of
