"""A gated feed-forward block in FP8 as one function: two products and the activation between them.

The widest tensors of a layer lie between the products. Here neither the activation's result nor
its derivative is ever written in 16 bits: both are computed from the up projection's output as they
are measured, and again as they are cast.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.layers.activation import gated, gated_gradients
from jaxtron.precision.fp8_product import Shape, backward, forward, operand
from jaxtron.precision.fp8_weight import Fp8Weight

_SHAPE = Shape(1, (None,))
Weights = tuple[Fp8Weight, Fp8Weight]


def fp8_gated_mlp(
    x: jax.Array, up: Fp8Weight, down: Fp8Weight, activation: str, name: str
) -> jax.Array:
    """``(activation(x gate) * x up) down``; the activation in fp32, rounded once.

    Args:
        x: ``[..., h]``.
        up: ``[h, 2, f]``, gate and up.
        down: ``[f, h]``.
        activation: of the gate, a name as ``model.activation``.
        name: for ``jax.checkpoint``, of the up projection's output.
    """
    gradients = (up.gradient, down.gradient)
    constants = tuple(dataclasses.replace(w, gradient=None) for w in (up, down))
    y = _mlp((activation, name), x.reshape(-1, x.shape[-1]), constants, gradients)
    return y.reshape(x.shape[:-1] + y.shape[-1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(how: Any, x: jax.Array, weights: Weights, gradients: Any) -> jax.Array:
    return _mlp_fwd(how, x, weights, gradients)[0]


def _mlp_fwd(how: Any, x: jax.Array, weights: Weights, gradients: Any) -> tuple[jax.Array, Any]:
    (activation, name), (up, down) = how, weights
    qx = operand(up, x, gradient=False)
    (u,) = forward(_SHAPE, qx, [up], x.dtype)
    u = checkpoint_name(u, name)
    qa = operand(down, u, gradient=False, compute=lambda u: (gated(u, activation),))
    (y,) = forward(_SHAPE, qa, [down], x.dtype)
    return y, (qx.kept(), u, qa.kept(), weights)


def _mlp_bwd(how: Any, residuals: Any, g: jax.Array) -> Any:
    activation, _ = how
    qx, u, qa, (up, down) = residuals
    qg = operand(down, g, gradient=True)
    da, (d_down,) = backward(_SHAPE, qa, qg, [down], g.dtype)
    compute = functools.partial(gated_gradients, activation=activation)
    qu = operand(up, u, da, gradient=True, compute=compute)
    dx, (d_up,) = backward(_SHAPE, qx, qu, [up], g.dtype)
    return dx, None, (d_up, d_down)


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
