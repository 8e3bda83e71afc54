"""Which choices fit when an expert takes a limited number of a sequence's tokens."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

DropPolicy = Literal["probs", "position"]


def expert_capacity(tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """``ceil(tokens * topk / experts * factor)``, at most ``tokens`` (Megatron's rule)."""
    return math.ceil(min(tokens * topk / num_experts * factor, tokens))


def fits(
    experts: jax.Array, weights: jax.Array, capacity: int, num_experts: int, policy: DropPolicy
) -> jax.Array:
    """Which choices of whole sequences an expert accepts: bool ``[b, s, topk]``.

    Args:
        experts: ``[b, s, topk]``; ``num_experts`` for a choice that asks for nothing.
        weights: fp32 ``[b, s, topk]``.
        capacity: choices that an expert accepts of a sequence.
        num_experts: how many there are.
        policy: ``probs`` accepts the highest weights (of equal ones the earlier token),
            ``position`` the earliest tokens.
    """
    rows, length, topk = experts.shape
    asked = experts.reshape(rows, -1)
    urgency = -weights.reshape(rows, -1) if policy == "probs" else jnp.zeros(asked.shape)
    entry = lax.broadcasted_iota(jnp.int32, asked.shape, 1)
    # by expert, then urgency, then position
    by_expert, _, order = lax.sort((asked, urgency, entry), dimension=1, num_keys=2, is_stable=True)
    first = jax.vmap(lambda a: jnp.searchsorted(a, jnp.arange(num_experts + 1)))(by_expert)
    rank = entry - jnp.take_along_axis(first, by_expert, axis=1)
    accepted = (rank < capacity) & (by_expert < num_experts)
    row = lax.broadcasted_iota(jnp.int32, asked.shape, 0)
    unsorted = jnp.zeros(asked.shape, jnp.bool_).at[row, order].set(accepted)
    return unsorted.reshape(rows, length, topk)
