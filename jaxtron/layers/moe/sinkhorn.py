"""Balanced assignment by Sinkhorn's iteration (Clark et al. 2022, arXiv:2202.01169)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.parallel.region import Region

ITERATIONS = 30
EPSILON = 1e-8


def sinkhorn(logits: jax.Array, live: jax.Array, region: Region, axes: Sequence[str]) -> jax.Array:
    """Scale ``exp(logits)`` so that tokens and experts of a sequence share alike.

    The unit is one row, so the result depends neither on the mesh nor on the microbatch cut. The
    number of iterations is fixed, so that devices that share a row do the same work.

    Args:
        logits: fp32 ``[b, s, experts]``.
        live: bool ``[b, s]``; other tokens take no share.
        region: the manual region.
        axes: mesh axes that split a row.

    Returns:
        ``[b, s, experts]`` without a derivative: rows add up to 1/tokens, columns to 1/experts.
    """
    peak = jnp.where(live[..., None], logits, -jnp.inf)
    peak = region.max(jnp.max(peak, axis=(1, 2), keepdims=True), axes)
    cost = jnp.where(live[..., None], jnp.exp(logits - peak), 0)
    cost = lax.stop_gradient(cost)
    tokens = region.sum(jnp.sum(live, axis=1, dtype=jnp.float32), axes)[:, None]
    experts = logits.shape[-1]

    def step(_: jax.Array, scales: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        _, by_expert = scales
        by_token = 1 / (
            jnp.maximum(tokens, 1) * (jnp.einsum("bse,be->bs", cost, by_expert) + EPSILON)
        )
        share = region.sum(jnp.einsum("bse,bs->be", cost, by_token), axes)
        return by_token, 1 / (experts * (share + EPSILON))

    start = (jnp.ones(live.shape), jnp.ones((logits.shape[0], experts)))
    by_token, by_expert = lax.fori_loop(0, ITERATIONS, step, start)
    return by_token[..., None] * cost * by_expert[:, None, :]
