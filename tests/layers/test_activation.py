"""Activations and their derivatives against NumPy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.layers.activation import ACTIVATIONS, activate


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


REFERENCE = {
    "swiglu": lambda x: x * sigmoid(x),
    "geglu": gelu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
}


def derivative(name: str, x: np.ndarray) -> np.ndarray:
    step = 1e-6
    return (REFERENCE[name](x + step) - REFERENCE[name](x - step)) / (2 * step)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 2**-8)])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_value_and_derivative_are_those_of_the_formula_rounded_once(
    name: str, parts: int, dtype: jnp.dtype, tolerance: float
) -> None:
    rng = np.random.default_rng(0)
    u = jnp.asarray(2 * rng.normal(size=(3, 5, parts, 64)), dtype)
    g = jnp.asarray(rng.normal(size=(3, 5, 64)), dtype)
    y, vjp = jax.vjp(lambda u: activate(u, name), u)
    (du,) = vjp(g)
    assert y.dtype == du.dtype == dtype

    u64, g64 = np.asarray(u, np.float64), np.asarray(g, np.float64)
    gate, up = u64[..., 0, :], u64[..., 1, :] if parts == 2 else 1.0
    expected = REFERENCE[name](gate) * up
    d_gate = g64 * up * derivative(name, gate)
    halves = [d_gate] if parts == 1 else [d_gate, g64 * REFERENCE[name](gate)]
    for seen, wanted in ((y, expected), (du, np.stack(halves, axis=-2))):
        np.testing.assert_allclose(np.asarray(seen, np.float64), wanted, rtol=tolerance, atol=5e-5)
