"""Dispatch by an exchange in which only the rows travel that have somewhere to go."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.layers.moe.dispatch import DispatchPlan, RunExperts
from jaxtron.layers.moe.permute import collect_rows, combine_rows, group_by_expert, place_rows


class Route(NamedTuple):
    """Where rows of a ragged exchange lie on this device; int32 ``[group]`` each.

    Attributes:
        sent_from: first row that goes to each peer.
        sent: rows that go to each peer.
        put_at: where each peer puts the first of them.
        received: rows that come from each peer.
        received_at: where the first of them is put.
        taken_from: first row of each peer that comes here.
    """

    sent_from: jax.Array
    sent: jax.Array
    put_at: jax.Array
    received: jax.Array
    received_at: jax.Array
    taken_from: jax.Array

    def back(self) -> "Route":
        """The way of the same rows back to where they came from."""
        return Route(
            sent_from=self.received_at,
            sent=self.received,
            put_at=self.taken_from,
            received=self.sent,
            received_at=self.sent_from,
            taken_from=self.put_at,
        )


def route_of(counts: jax.Array, me: jax.Array) -> Route:
    """Rows in the order of their target on the sender, of their sender on the receiver.

    Args:
        counts: int32 ``[sender, receiver]``.
        me: this device's number in its group.
    """
    sent_from = jnp.cumsum(counts, axis=1) - counts
    put_at = jnp.cumsum(counts, axis=0) - counts
    return Route(
        sent_from=sent_from[me],
        sent=counts[me],
        put_at=put_at[me],
        received=counts[:, me],
        received_at=put_at[:, me],
        taken_from=sent_from[:, me],
    )


def ragged_exchange(rows: jax.Array, route: Route, size: int, axes: tuple[str, ...]) -> jax.Array:
    """``[size, h]`` rows that came from all devices of the group; zeros behind them.

    JAX has no such operation on CPUs.
    """
    return lax.ragged_all_to_all(
        rows,
        jnp.zeros((size, *rows.shape[1:]), rows.dtype),
        route.sent_from,
        route.sent,
        route.put_at,
        route.received,
        axis_name=axes,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange(rows: jax.Array, route: Route, size: int, axes: tuple[str, ...]) -> jax.Array:
    """:func:`ragged_exchange`, whose derivative sends rows back the same way."""
    return ragged_exchange(rows, route, size, axes)


def _exchange_forward(rows: jax.Array, route: Route, size: int, axes: tuple[str, ...]) -> Any:
    return ragged_exchange(rows, route, size, axes), (route, rows.shape[0])


def _exchange_backward(size: int, axes: tuple[str, ...], residuals: Any, g: jax.Array) -> Any:
    route, rows = residuals
    return ragged_exchange(g, route.back(), rows, axes), None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def dispatch_ragged(
    x: jax.Array, experts: jax.Array, weights: jax.Array, run: RunExperts, plan: DispatchPlan
) -> jax.Array:
    """Send each device the rows of its experts, as many as there are, and the results back.

    Buffers have room for the most rows that could come, as with ``alltoall``; what travels are the
    rows that are there. Every device learns all counts first (``group * num_experts`` integers).
    """
    tokens, topk = experts.shape
    outgoing, counts = group_by_expert(experts, plan.num_experts, tokens * topk)
    counts = lax.all_gather(counts, plan.axes).reshape(plan.group, plan.group, -1)
    me = lax.axis_index(plan.axes)
    route = route_of(jnp.sum(counts, axis=2), me)
    room = plan.group * plan.rows_from_one(tokens, topk)
    sent = _exchange(place_rows(x, outgoing), route, room, plan.axes)
    # rows that arrived lie by sender, those of a sender by expert
    ends = jnp.cumsum(counts[:, me].reshape(-1))
    number = jnp.searchsorted(ends, jnp.arange(room, dtype=jnp.int32), side="right")
    local = plan.local_experts
    expert = jnp.where(number < plan.group * local, number % local, local).astype(jnp.int32)
    slots, stride = plan.slots(tokens, topk)
    arrived, sizes = group_by_expert(expert[:, None], local, slots, stride, plan.tile)
    out = run(place_rows(sent, arrived, plan.kernels), sizes)
    out = collect_rows(out, arrived, plan.kernels)
    back = _exchange(out, route.back(), tokens * topk, plan.axes)
    return combine_rows(back, weights, outgoing)
