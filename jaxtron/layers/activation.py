"""Activation functions of feed-forward blocks and experts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
}


def activate(u: jax.Array, activation: str) -> jax.Array:
    """``act(u)``, or ``act(gate) * up`` of a gated activation (Shazeer 2020, arXiv:2002.05202).

    Computed in fp32 whatever the dtype of ``u``, and rounded once.

    Args:
        u: ``[..., parts, f]``: one part, or gate and up.
        activation: ``model.activation``.

    Returns:
        ``[..., f]`` in the dtype of ``u``.
    """
    if u.shape[-2] == 1:
        return ACTIVATIONS[activation](u[..., 0, :].astype(jnp.float32)).astype(u.dtype)
    return _gated(activation, u)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: str, u: jax.Array) -> jax.Array:
    gate, up = (u[..., part, :].astype(jnp.float32) for part in (0, 1))
    return (ACTIVATIONS[activation](gate) * up).astype(u.dtype)


def _gated_fwd(activation: str, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gated(activation, u), u


def _gated_bwd(activation: str, u: jax.Array, g: jax.Array) -> tuple[Any]:
    # The derivative of two slices would be the sum of two padded halves, which XLA computes whole
    # for each element; side by side they are one pass.
    gate, up = (u[..., part, :].astype(jnp.float32) for part in (0, 1))
    g = g.astype(jnp.float32)
    act, of_act = jax.vjp(ACTIVATIONS[activation], gate)
    (d_gate,) = of_act(g * up)
    halves = [d_gate.astype(u.dtype), (g * act).astype(u.dtype)]
    return (jnp.concatenate(halves, axis=-1).reshape(u.shape),)


_gated.defvjp(_gated_fwd, _gated_bwd)
