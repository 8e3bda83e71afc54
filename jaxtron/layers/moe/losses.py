"""Auxiliary losses of the router, as pieces of the objective.

Every loss is a mean over the live tokens of the step (tokens that a later label can see), with the
weights that the step gives them (``token_weights``: they add up to 1 over all microbatches and
devices). A device's piece is the sum over its own tokens; what the loss needs of other tokens,
counts of choices, has no derivative and is summed over the devices that share the unit. So the
pieces add up to the closed form on every mesh.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtron.parallel.region import Region


def count_choices(experts: jax.Array, live: jax.Array, num_experts: int) -> jax.Array:
    """How many live tokens chose each expert, per row: int32 ``[b, experts]``.

    Args:
        experts: ``[b, s, topk]``, different experts for a token.
        live: bool ``[b, s]``.
        num_experts: how many there are.
    """
    chosen = jnp.where(live[..., None], experts, num_experts).reshape(experts.shape[0], -1, 1)
    return jnp.sum(chosen == jnp.arange(num_experts), axis=1, dtype=jnp.int32)


def balancing_loss(
    scores: jax.Array,
    counts: jax.Array,
    token_weights: jax.Array,
    *,
    topk: int,
    region: Region,
    axes: Sequence[str],
    over_rows: bool,
    earlier: jax.Array | int = 0,
) -> jax.Array:
    """Piece of ``E / (topk T^2) sum_e (sum_t p_te) N_e`` averaged over its units by their tokens.

    T tokens are in a unit, N_e of them chose expert e, p are the scores; balanced loads give 1.
    Fedus et al. 2021 (arXiv:2101.03961) eq. 4; per sequence: DeepSeek-V3 eq. 17.

    Args:
        scores: fp32 ``[b, s, experts]``, a distribution over experts.
        counts: ``[b, experts]`` of :func:`count_choices`, of this device's tokens.
        token_weights: fp32 ``[b, s]``, 0 for tokens that are not live.
        topk: experts per token.
        region: the manual region.
        axes: mesh axes that split a unit.
        over_rows: whether a unit is all rows (a microbatch), or one row (a sequence).
        earlier: int32 ``[experts]``, choices in microbatches before that count with this one's, of
            all devices. N and T are then the sums, and one T is still that of this microbatch.
    """
    if over_rows:
        counts = jnp.sum(counts, axis=0, keepdims=True)
    counts = region.sum(counts, axes) + earlier
    tokens = jnp.maximum(jnp.sum(counts, axis=-1) // topk, 1)
    load = counts.astype(jnp.float32) * (counts.shape[-1] / (topk * tokens[:, None]))
    each = jnp.sum(scores * load[:, None, :], axis=-1)
    return jnp.sum(jnp.where(token_weights > 0, each, 0) * token_weights)


def z_loss(logits: jax.Array, token_weights: jax.Array) -> jax.Array:
    """Piece of the mean of ``logsumexp(logits)^2`` (ST-MoE, arXiv:2202.08906, eq. 5).

    Args:
        logits: fp32 ``[b, s, experts]``.
        token_weights: as in :func:`balancing_loss`.
    """
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.sum(jnp.where(token_weights > 0, squares, 0) * token_weights)
