"""Clipping by the global norm of the gradient."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.named_scope("clip")
def clip_by_global_norm(grads: Any, max_norm: float) -> tuple[Any, jax.Array]:
    """Scale ``grads`` so that their norm is at most ``max_norm``, as Megatron does.

    The coefficient is ``max_norm / (norm + 1e-6)``, applied when it is less than 1. Runs under
    plain ``jit`` on global arrays, so that a logical parameter counts once however it is sharded.

    Args:
        grads: tree of gradients.
        max_norm: static; 0: measure only.

    Returns:
        (gradients in their own dtypes, float32 L2 norm before clipping). Where the norm is not
        finite the gradients are returned as they are: scaling by 0 would hide what happened.
    """
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    norm = jnp.sqrt(sum(squares, start=jnp.float32(0.0)))
    if max_norm == 0.0:
        return grads, norm
    coefficient = max_norm / (norm + 1e-6)
    applied = jnp.where(jnp.isfinite(norm) & (coefficient < 1.0), coefficient, 1.0)
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * applied).astype(g.dtype), grads)
    return scaled, norm
