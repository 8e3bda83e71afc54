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


def gated(u: jax.Array, activation: str) -> jax.Array:
    """``act(gate) * up`` of ``u [..., 2, f]``, in fp32 and rounded once: ``[..., f]``."""
    gate, up = _halves(u)
    return (ACTIVATIONS[activation](gate) * up).astype(u.dtype)


def gated_gradients(u: jax.Array, g: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    """Gradients of gate and up, ``[..., f]`` each, for the gradient ``g`` of :func:`gated`."""
    gate, up = _halves(u)
    g = g.astype(jnp.float32)
    act, of_act = jax.vjp(ACTIVATIONS[activation], gate)
    (d_gate,) = of_act(g * up)
    return d_gate.astype(u.dtype), (g * act).astype(u.dtype)


def _halves(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    return u[..., 0, :].astype(jnp.float32), u[..., 1, :].astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: str, u: jax.Array) -> jax.Array:
    return gated(u, activation)


def _gated_fwd(activation: str, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gated(u, activation), u


def _gated_bwd(activation: str, u: jax.Array, g: jax.Array) -> tuple[Any]:
    # The derivative of two slices would be the sum of two padded halves, which XLA computes whole
    # for each element; side by side they are one pass.
    return (jnp.concatenate(gated_gradients(u, g, activation), axis=-1).reshape(u.shape),)


_gated.defvjp(_gated_fwd, _gated_bwd)
