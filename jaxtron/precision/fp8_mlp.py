"""A gated feed-forward block in FP8 as one function: two products and the activation between them.

The widest tensors of a layer lie between the products. Here neither the activation's result nor
its derivative is ever written in 16 bits: both are computed from the up projection's output as they
are measured, and again as they are cast.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.layers.activation import gated, gated_gradients
from jaxtron.precision.fp8_operand import operands
from jaxtron.precision.fp8_product import Shape, backward, forward
from jaxtron.precision.fp8_weight import Fp8Weight

_SHAPE = Shape(1, (None,))
Weights = tuple[Fp8Weight, Fp8Weight]
Parts = tuple[jax.Array, ...]


def fp8_gated_mlp(
    parts: Sequence[jax.Array], up: Fp8Weight, down: Fp8Weight, activation: str, name: str
) -> list[jax.Array]:
    """``(activation(x gate) * x up) down``; the activation in fp32, rounded once.

    Args:
        parts: ``x [..., h]`` each. If there are several they arrive, and so do those of the
            result's gradient.
        up: ``[h, 2, f]``, gate and up.
        down: ``[f, h]``.
        activation: of the gate, a name as ``model.activation``.
        name: for ``jax.checkpoint``, of the up projection's output.
    """
    gradients = (up.gradient, down.gradient)
    constants = tuple(dataclasses.replace(w, gradient=None) for w in (up, down))
    rows = tuple(x.reshape(-1, x.shape[-1]) for x in parts)
    ys = _mlp((activation, name), rows, constants, gradients)
    return [y.reshape(x.shape[:-1] + y.shape[-1:]) for x, y in zip(parts, ys, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(how: Any, xs: Parts, weights: Weights, gradients: Any) -> Parts:
    return _mlp_fwd(how, xs, weights, gradients)[0]


def _mlp_fwd(how: Any, xs: Parts, weights: Weights, gradients: Any) -> tuple[Parts, Any]:
    (activation, name), (up, down), dtype = how, weights, xs[0].dtype
    qxs = operands(up, [(x,) for x in xs], gradient=False, arrives=True)
    us = [checkpoint_name(forward(_SHAPE, qx, [up], dtype)[0], name) for qx in qxs]
    compute = lambda u: (gated(u, activation),)  # noqa: E731
    qas = operands(down, [(u,) for u in us], gradient=False, compute=compute)
    ys = tuple(forward(_SHAPE, qa, [down], dtype)[0] for qa in qas)
    return ys, ([qx.kept() for qx in qxs], us, [qa.kept() for qa in qas], weights)


def _mlp_bwd(how: Any, residuals: Any, gs: Parts) -> Any:
    activation, _ = how
    qxs, us, qas, (up, down) = residuals
    dtype = gs[0].dtype
    qgs = operands(down, [(g,) for g in gs], gradient=True, arrives=True)
    das, (d_down,) = backward(_SHAPE, qas, qgs, [down], dtype)
    compute = functools.partial(gated_gradients, activation=activation)
    pairs = list(zip(us, das, strict=True))
    qus = operands(up, pairs, gradient=True, compute=compute)
    dxs, (d_up,) = backward(_SHAPE, qxs, qus, [up], dtype)
    return tuple(dxs), None, (d_up, d_down)


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
