"""The gated block in FP8 against NumPy, with scales of the tensors and with given ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.precision.fp8_mlp import fp8_gated_mlp
from jaxtron.precision.fp8_weight import Fp8Gradient, Fp8Weight
from tests.precision import emulation
from tests.precision.test_fp8_product import draw, error, fp8_weights

GIVEN = {"up": np.array([2.0**-7, 2.0**-22], np.float32), "down": np.array([0.03125, 2.0**-20])}


def expected(
    x: np.ndarray, up: np.ndarray, down: np.ndarray, g: np.ndarray, given: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Forward and backward pass written out; ``x [m, h]``, ``up [h, 2, f]``."""

    def fp8(name: str, operand: int, a: np.ndarray) -> np.ndarray:
        by = np.float32(given[name][operand]) if given else None
        return emulation.quantised(a, ("e4m3", "e5m2")[operand], by)

    f = up.shape[2]
    qx, q_up, q_down = (
        fp8("up", 0, x),
        emulation.quantised(up, "e4m3"),
        emulation.quantised(down, "e4m3"),
    )
    u = qx @ q_up.reshape(len(up), 2 * f)
    gate, value = u[:, :f], u[:, f:]
    sigmoid = 1 / (1 + np.exp(-gate))
    act = gate * sigmoid * value
    qa, qg = fp8("down", 0, act), fp8("down", 1, g)
    d_act = qg @ q_down.T
    d_gate = d_act * value * (sigmoid + gate * sigmoid * (1 - sigmoid))
    du = np.concatenate([d_gate, d_act * gate * sigmoid], axis=1)
    qu = fp8("up", 1, du)
    return {
        "y": qa @ q_down,
        "dx": qu @ q_up.reshape(len(up), 2 * f).T,
        "up": (qx.T @ qu).reshape(up.shape),
        "down": qa.T @ qg,
        "amax": np.array([[np.abs(a).max() for a in pair] for pair in ((x, du), (act, g))]),
    }


@pytest.mark.parametrize(
    "given, cuts", [({}, []), (GIVEN, []), (GIVEN, [1, 4])], ids=["current", "delayed", "in parts"]
)
def test_output_and_derivatives_equal_numpy(given: dict[str, np.ndarray], cuts: list[int]) -> None:
    x, up, down, g = draw(6, 1, 8), draw(8, 2, 6), draw(6, 8), draw(6, 1, 8) * 1e-3
    weights = [*fp8_weights([up]), *fp8_weights([down])]

    def with_scales(weight: Fp8Weight, name: str) -> Fp8Weight:
        if not given:
            return weight
        empty = Fp8Gradient(weight.gradient.weight, jnp.zeros(2))
        return dataclasses.replace(weight, scales=jnp.asarray(given[name]), gradient=empty)

    weights = [with_scales(w, name) for w, name in zip(weights, ("up", "down"), strict=True)]

    def apply(x: jax.Array, gradients: list[Fp8Gradient]) -> jax.Array:
        pair = [dataclasses.replace(w, gradient=d) for w, d in zip(weights, gradients, strict=True)]
        return jnp.concatenate(fp8_gated_mlp(jnp.split(x, cuts), *pair, "swiglu", "mlp_up"))

    y, vjp = jax.vjp(apply, jnp.asarray(x), [w.gradient for w in weights])
    dx, gradients = vjp(jnp.asarray(g))
    right: dict[str, Any] = expected(x.reshape(6, 8), up, down, g.reshape(6, 8), given)
    assert error(y, right["y"].reshape(6, 1, 8)) < 1e-5
    assert error(dx, right["dx"].reshape(6, 1, 8)) < 1e-5
    assert error(gradients[0].weight, right["up"]) < 1e-5
    assert error(gradients[1].weight, right["down"]) < 1e-5
    if given:
        assert error(jnp.stack([d.amax for d in gradients]), right["amax"]) < 1e-5
