"""Hopper kernels that move rows or work on their elements, in tiles in use (Pallas, Mosaic GPU).

Rows lie as in ``grouped_matmul_hopper.py``: tiles behind the last group are neither read nor
written. Nothing is computed that memory would have to wait for, so each warpgroup only loads,
computes and stores in registers, 16 bytes a thread and instruction, one piece after the other.
Eight warpgroups on a multiprocessor hide the way to memory from each other.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtron.kernels.grouped_matmul_hopper import ROW_TILE, plgpu_module, tile_groups

WARPGROUPS = 8  # of a thread block, which has a multiprocessor for itself
THREADS = 128  # of a warpgroup
VECTOR = 8  # bf16 numbers in 16 bytes
PIECE = 2 * VECTOR * THREADS  # numbers of each operand that a warpgroup computes with at once
AT_ONCE = 4 * VECTOR * THREADS  # numbers that it moves at once, where rows are not longer


def _kernel(body: Any, shape: Any, blocks: int) -> Any:
    plgpu = plgpu_module()
    return plgpu.kernel(
        body,
        out_type=shape,
        grid=(blocks,),
        grid_names=("sm",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # of 32 bits, for results of 16
            unsafe_no_auto_barriers=True,  # no thread reads what one has written
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )


def _each(total: Any, blocks: int, body: Any) -> None:
    """``body(index)`` for this warpgroup's share of ``range(total)``."""
    workers = blocks * WARPGROUPS
    first = lax.axis_index("sm") * WARPGROUPS + lax.axis_index("wg")

    def one(i: jax.Array, _: None) -> None:
        body(first + i * workers)

    lax.fori_loop(0, (total - first + workers - 1) // workers, one, None)


def _load(ref: Any, vector: int = VECTOR) -> jax.Array:
    plgpu = plgpu_module()
    return plgpu.layout_cast(ref[...], plgpu.Layout.WG_STRIDED(ref.shape, vec_size=vector))


def _silu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Value and derivative."""
    sigmoid = 1 / (1 + jnp.exp(-x))
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


ACTIVATIONS = {"swiglu": _silu}
"""Gated activations that have kernels, by their ``model.activation``."""


def _piece(width: int) -> tuple[int, int]:
    columns = math.gcd(width, VECTOR * THREADS)
    return PIECE // columns, columns


@functools.partial(jax.jit, static_argnames=("activation", "blocks"))
def gated_rows(u: jax.Array, sizes: jax.Array, *, activation: str, blocks: int) -> jax.Array:
    """``act(gate) * up``, in fp32 and rounded once.

    Args:
        u: bf16 ``[M, 2, F]``: gate and up; groups aligned to ``ROW_TILE``, F to 128.
        sizes: int32 ``[groups]``, rows of each group.
        activation: one of :data:`ACTIVATIONS`.
        blocks: thread blocks, one a multiprocessor.

    Returns:
        bf16 ``[M, F]``; anything in tiles behind the last group.
    """
    count, _, width = u.shape
    rows, columns = _piece(width)
    across = width // columns

    def gated_activation(used: Any, u: Any, out: Any) -> None:
        def one(index: jax.Array) -> None:
            where = pl.ds(index // across * rows, rows)
            column = lax.rem(index, across) * columns
            gate = _load(u.at[where, pl.ds(column, columns)]).astype(jnp.float32)
            up = _load(u.at[where, pl.ds(width + column, columns)]).astype(jnp.float32)
            value, _ = ACTIVATIONS[activation](gate)
            out[where, pl.ds(column, columns)] = (value * up).astype(out.dtype)

        _each(used[0] * (ROW_TILE // rows) * across, blocks, one)

    kernel = _kernel(gated_activation, jax.ShapeDtypeStruct((count, width), u.dtype), blocks)
    _, used = tile_groups(sizes, 1)
    result: jax.Array = kernel(used, u.reshape(count, 2 * width))
    return result


@functools.partial(jax.jit, static_argnames=("activation", "blocks"))
def gated_rows_gradient(
    u: jax.Array, g: jax.Array, sizes: jax.Array, *, activation: str, blocks: int
) -> jax.Array:
    """Gradient of ``u [M, 2, F]`` for the gradient ``g [M, F]`` of :func:`gated_rows`."""
    count, _, width = u.shape
    rows, columns = _piece(width)
    across = width // columns

    def gated_activation_gradient(used: Any, u: Any, g: Any, out: Any) -> None:
        def one(index: jax.Array) -> None:
            where = pl.ds(index // across * rows, rows)
            column = lax.rem(index, across) * columns
            of_gate, of_up = pl.ds(column, columns), pl.ds(width + column, columns)
            gate = _load(u.at[where, of_gate]).astype(jnp.float32)
            up = _load(u.at[where, of_up]).astype(jnp.float32)
            d_out = _load(g.at[where, of_gate]).astype(jnp.float32)
            value, slope = ACTIVATIONS[activation](gate)
            out[where, of_gate] = (d_out * up * slope).astype(out.dtype)
            out[where, of_up] = (d_out * value).astype(out.dtype)

        _each(used[0] * (ROW_TILE // rows) * across, blocks, one)

    shape = jax.ShapeDtypeStruct((count, 2 * width), u.dtype)
    kernel = _kernel(gated_activation_gradient, shape, blocks)
    _, used = tile_groups(sizes, 1)
    result: jax.Array = kernel(used, u.reshape(count, 2 * width), g)
    return result.reshape(u.shape)


def _chunks(width: int) -> list[tuple[int, int, int]]:
    """Start, length and vector of the parts of a row: as much as possible in 16 bytes a thread."""
    chunks, start = [], 0
    for vector in (VECTOR, VECTOR // 2, VECTOR // 4, VECTOR // 8):
        while width - start >= vector * THREADS:
            chunks.append((start, vector * THREADS, vector))
            start += vector * THREADS
    return chunks


@functools.partial(jax.jit, static_argnames=("topk", "blocks"))
def placed_rows(
    x: jax.Array,
    source: jax.Array,
    sizes: jax.Array,
    weights: jax.Array | None = None,
    *,
    topk: int,
    blocks: int,
) -> jax.Array:
    """``out[m] = x[source[m] // topk]``, or that times ``weights[source[m]]`` in fp32.

    Args:
        x: bf16 ``[N, h]``, h aligned to 128.
        source: int32 ``[M]``; ``N topk`` for an unfilled slot, which becomes zero; groups aligned
            to ``ROW_TILE``.
        sizes: int32 ``[groups]``, rows of each group.
        weights: fp32 ``[N topk]``; None: not weighted.
        topk: see above.
        blocks: thread blocks, one a multiprocessor.

    Returns:
        bf16 ``[M, h]``; anything in tiles behind the last group.
    """
    count, width = source.shape[0], x.shape[1]
    entries = x.shape[0] * topk
    at_once = 1
    while at_once < 8 and 2 * at_once * width <= AT_ONCE:
        at_once *= 2
    chunks = _chunks(width)

    def place_rows(used: Any, source: Any, x: Any, *rest: Any) -> None:
        *weights, out = rest

        def one(index: jax.Array) -> None:
            loaded = []
            for i in range(at_once):
                row = index * at_once + i
                entry = source[row]
                filled = entry < entries
                entry = jnp.minimum(entry, entries - 1)
                token = x.at[lax.div(entry, topk)]
                values = [_load(token.at[pl.ds(c, n)], vector) for c, n, vector in chunks]
                loaded.append((row, filled, [w[entry] for w in weights], values))
            for row, filled, weight, values in loaded:
                for (start, length, _), value in zip(chunks, values, strict=True):
                    if weight:
                        value = (value.astype(jnp.float32) * weight[0]).astype(out.dtype)
                    out[row, pl.ds(start, length)] = jnp.where(filled, value, jnp.zeros_like(value))

        _each(used[0] * (ROW_TILE // at_once), blocks, one)

    kernel = _kernel(place_rows, jax.ShapeDtypeStruct((count, width), x.dtype), blocks)
    _, used = tile_groups(sizes, 1)
    result: jax.Array = kernel(used, source, x, *([] if weights is None else [weights]))
    return result
