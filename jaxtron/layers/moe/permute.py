"""Moving rows to slots and back, by gathers alone in both directions of differentiation.

A permutation places some of N x k entries (entry ``n k + j`` is choice j of token n) on M slots.
``source [M]`` is the entry of a slot (N k: none) and ``slots [N, k]`` the slot of an entry (M:
none), so that a gather's transpose is a gather too, and no sum depends on an order of execution.
Slots in tiles behind the last group may hold anything where kernels are given that leave them so.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.kernels.grouped_matmul_spec import RowKernels


class Permutation(NamedTuple):
    """Where entries go: int32 ``source [M]`` and ``slots [N, k]``.

    ``sizes [groups]``: filled slots of each group, where groups follow each other in whole tiles.
    """

    source: jax.Array
    slots: jax.Array
    sizes: jax.Array | None = None


def inverse_slots(order: jax.Array) -> jax.Array:
    """The place of every entry in ``order``, a permutation of ``0..len - 1``."""
    places = jnp.arange(order.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(places).at[order].set(places, unique_indices=True)


def group_by_expert(
    experts: jax.Array, num_experts: int, slots: int, stride: int | None = None, tile: int = 1
) -> tuple[Permutation, jax.Array]:
    """Place entries on slots, those of an expert side by side in their order.

    Args:
        experts: int32 ``[N, k]``; ``num_experts`` for an entry that goes nowhere.
        num_experts: how many experts there are.
        slots: M, enough for all entries.
        stride: slots reserved for each expert, enough for any; None: experts follow each other.
        tile: without a stride experts begin at multiples of this.

    Returns:
        the permutation, and int32 ``[num_experts]`` entries of each expert.
    """
    flat = experts.reshape(-1)
    numbers = jnp.arange(num_experts, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = inverse_slots(order)  # of each entry among the sorted ones
    sizes = jnp.sum(flat[:, None] == numbers, axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    reserved = (sizes + tile - 1) // tile * tile
    if stride is not None:
        reserved = jnp.full_like(sizes, stride)
    slot_ends = jnp.cumsum(reserved)
    shift = slot_ends - reserved - starts  # from the place among the sorted to the slot
    slot = jnp.arange(slots, dtype=jnp.int32)
    of_slot = jnp.sum(slot[:, None] >= slot_ends, axis=1, dtype=jnp.int32)
    sorted_place = slot - shift.at[of_slot].get(mode="clip")
    ends = (starts + sizes).at[of_slot].get(mode="clip")
    filled = (of_slot < num_experts) & (sorted_place < ends)
    source = jnp.where(filled, order.at[sorted_place].get(mode="clip"), flat.shape[0])
    entry_slot = place + shift.at[flat].get(mode="clip")
    placed = jnp.where(flat < num_experts, entry_slot, slots)
    # Computed once: XLA would work it out again for every element that it moves.
    slots_of = placed.reshape(experts.shape)
    return lax.optimization_barrier((Permutation(source, slots_of, sizes), sizes))


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of ``x`` by number; zeros for a number past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def _gather_sum(x: jax.Array, slots: jax.Array) -> jax.Array:
    """``y[n] = sum_j x[slots[n, j]]``, added in fp32 in the order of j."""
    if slots.shape[1] == 1:
        return _rows(x, slots[:, 0])
    summed = jnp.sum(_rows(x, slots).astype(jnp.float32), axis=1).astype(x.dtype)
    return lax.optimization_barrier(summed)  # as in combine_rows


def _place(
    x: jax.Array,
    permutation: Permutation,
    kernels: RowKernels | None,
    weights: jax.Array | None = None,
) -> jax.Array:
    """Rows of ``x [N, h]`` on the slots, times the entries' ``weights [N, k]``: ``[M, h]``."""
    source, topk = permutation.source, permutation.slots.shape[1]
    if kernels is not None and permutation.sizes is not None:
        return kernels.place(x, source, permutation.sizes, topk, weights)
    if weights is None:
        return _rows(x, source // topk)
    weight = weights.reshape(-1).at[source].get(mode="fill", fill_value=0)
    return (_rows(x.astype(jnp.float32), source // topk) * weight[:, None]).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def place_rows(
    x: jax.Array, permutation: Permutation, kernels: RowKernels | None = None
) -> jax.Array:
    """Rows ``[M, h]`` of ``x [N, h]`` on the slots; empty slots are zero."""
    return _place(x, permutation, kernels)


def _place_forward(x: jax.Array, permutation: Permutation, kernels: RowKernels | None) -> Any:
    return place_rows(x, permutation, kernels), permutation


def _place_backward(kernels: RowKernels | None, permutation: Permutation, g: jax.Array) -> Any:
    return _gather_sum(g, permutation.slots), None


place_rows.defvjp(_place_forward, _place_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect_rows(
    rows: jax.Array, permutation: Permutation, kernels: RowKernels | None = None
) -> jax.Array:
    """``[N, h]``: sums over each token's slots of ``rows [M, h]``; the transpose of placing."""
    return _gather_sum(rows, permutation.slots)


def _collect_forward(rows: jax.Array, permutation: Permutation, kernels: RowKernels | None) -> Any:
    return collect_rows(rows, permutation, kernels), permutation


def _collect_backward(kernels: RowKernels | None, permutation: Permutation, g: jax.Array) -> Any:
    return _place(g, permutation, kernels), None


collect_rows.defvjp(_collect_forward, _collect_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def combine_rows(
    rows: jax.Array,
    weights: jax.Array,
    permutation: Permutation,
    kernels: RowKernels | None = None,
) -> jax.Array:
    """Weighted sums ``y[n] = sum_j weights[n, j] rows[slots[n, j]]``, in fp32.

    Args:
        rows: ``[M, h]``.
        weights: fp32 ``[N, k]``.
        permutation: where the entries' rows are; an entry without a slot adds nothing.
        kernels: compute the gradient of ``rows``, if not None.

    Returns:
        ``[N, h]`` in the dtype of ``rows``.
    """
    each = _rows(rows, permutation.slots).astype(jnp.float32)
    combined = jnp.sum(each * weights[..., None], axis=1).astype(rows.dtype)
    # Gathered once: XLA would put the gather into each of several kernels that read the result.
    return lax.optimization_barrier(combined)


def _combine_forward(
    rows: jax.Array, weights: jax.Array, permutation: Permutation, kernels: RowKernels | None
) -> Any:
    combined = combine_rows(rows, weights, permutation, kernels)
    return combined, (rows, weights, permutation)


def _combine_backward(kernels: RowKernels | None, residuals: Any, g: jax.Array) -> Any:
    rows, weights, permutation = residuals
    g32 = g.astype(jnp.float32)
    each = _rows(rows, permutation.slots).astype(jnp.float32)
    d_weights = jnp.sum(each * g32[:, None, :], axis=2)
    return _place(g, permutation, kernels, weights), d_weights, None


combine_rows.defvjp(_combine_forward, _combine_backward)
