"""Dispatch by exchange: a choice travels to the device of its expert and back."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.layers.moe.dispatch import DispatchPlan, RunExperts
from jaxtron.layers.moe.permute import (
    Permutation,
    collect_rows,
    combine_rows,
    group_by_expert,
    inverse_slots,
    place_rows,
)


def dispatch_alltoall(
    x: jax.Array, experts: jax.Array, weights: jax.Array, run: RunExperts, plan: DispatchPlan
) -> jax.Array:
    """Send rows to their experts' devices with ``all_to_all``, and the results back.

    A buffer has room for the most rows that one device can send another: with a capacity
    ``local_experts * most``, dropless ``N * min(topk, local_experts)``.
    """
    per_peer = plan.rows_from_one(*experts.shape)
    outgoing, counts = _by_device(experts, plan, per_peer)
    sent = _exchange(place_rows(x, outgoing), plan)
    # counts of choices of this device's experts, per sender: rows of a sender come by expert
    counts = _exchange(counts.reshape(-1, 1), plan).reshape(plan.group, -1)
    ends = jnp.cumsum(counts, axis=1)
    row = jnp.arange(per_peer, dtype=jnp.int32)
    number = jax.vmap(lambda e: jnp.searchsorted(e, row, side="right"))(ends)
    slots, stride = plan.slots(*experts.shape)
    arrived, sizes = group_by_expert(
        number.reshape(-1, 1).astype(jnp.int32), plan.local_experts, slots, stride, plan.tile
    )
    out = run(place_rows(sent, arrived, plan.kernels), sizes)
    back = _exchange(collect_rows(out, arrived, plan.kernels), plan)
    return combine_rows(back, weights, outgoing)


def _exchange(a: jax.Array, plan: DispatchPlan) -> jax.Array:
    """The d-th part of ``a [group * n, ...]`` goes to device d of the group."""
    return lax.all_to_all(a, plan.axes, split_axis=0, concat_axis=0, tiled=True)


def _by_device(
    experts: jax.Array, plan: DispatchPlan, per_peer: int
) -> tuple[Permutation, jax.Array]:
    """Slots ``[device, per_peer]``, a device's entries by expert; and entries of each expert."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = inverse_slots(order)
    numbers = jnp.arange(plan.num_experts, dtype=jnp.int32)
    counts = jnp.sum(flat[:, None] == numbers, axis=0, dtype=jnp.int32)
    per_device = jnp.sum(counts.reshape(plan.group, -1), axis=1)
    starts = jnp.cumsum(per_device) - per_device
    device = jnp.minimum(flat // plan.local_experts, plan.group - 1)
    slot = device * per_peer + place - starts[device]
    slots = jnp.where(flat < plan.num_experts, slot, plan.group * per_peer)
    within = jnp.arange(per_peer, dtype=jnp.int32)
    sorted_place = starts[:, None] + within
    source = jnp.where(
        within < per_device[:, None], order.at[sorted_place].get(mode="clip"), flat.shape[0]
    )
    permutation = Permutation(source.reshape(-1), slots.reshape(experts.shape))
    return lax.optimization_barrier((permutation, counts))  # computed once, see group_by_expert
