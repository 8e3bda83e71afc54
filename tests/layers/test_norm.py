"""Normalisation against its formulas in float64, and what its backward pass keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtron.layers.norm import Norm
from jaxtron.models.config import ModelConfig

SIZE = 32


def norm(kind: str) -> Norm:
    config = ModelConfig(
        num_layers=1,
        hidden_size=SIZE,
        num_attention_heads=1,
        vocab_size=8,
        ffn_hidden_size=8,
        max_position_embeddings=8,
        normalization=kind,
        layernorm_epsilon=1e-5,
    )
    module = Norm(config, SIZE)
    rng = np.random.default_rng(1)
    for name in ("weight", "bias") if kind == "LayerNorm" else ("weight",):
        setattr(module, name, nnx.Param(jnp.asarray(rng.normal(size=SIZE), jnp.float32)))
    return module


def reference(kind: str, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight + bias


def slopes(f, value: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Central differences of ``sum(g * f(value))``, one number at a time."""
    out = np.zeros_like(value)
    for i in np.ndindex(value.shape):
        step = np.zeros_like(value)
        step[i] = 1e-6
        out[i] = (g * (f(value + step) - f(value - step))).sum() / 2e-6
    return out


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_value_and_derivatives_are_those_of_the_formula(kind: str) -> None:
    rng = np.random.default_rng(0)
    module = norm(kind)
    x, g = 3 * rng.normal(size=(2, 3, SIZE)), rng.normal(size=(2, 3, SIZE))
    weight = np.asarray(module.weight[...], np.float64)
    bias = np.asarray(module.bias[...], np.float64) if kind == "LayerNorm" else np.zeros(SIZE)
    graph, params = nnx.split(module)

    def apply(params, x):
        return nnx.merge(graph, params)(x)

    y, vjp = jax.vjp(apply, params, jnp.asarray(x, jnp.float32))
    d_params, dx = vjp(jnp.asarray(g, jnp.float32))
    close = {"rtol": 2e-4, "atol": 2e-5}
    np.testing.assert_allclose(y, reference(kind, x, weight, bias), **close)
    np.testing.assert_allclose(
        dx, slopes(lambda x: reference(kind, x, weight, bias), x, g), **close
    )
    by_weight = slopes(lambda w: reference(kind, x, w, bias), weight, g)
    np.testing.assert_allclose(d_params["weight"][...], by_weight, **close)
    if kind == "LayerNorm":
        np.testing.assert_allclose(d_params["bias"][...], g.sum((0, 1)), **close)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_the_backward_pass_keeps_the_input_and_numbers_of_a_row(kind: str) -> None:
    x = jnp.ones((4, 16, SIZE), jnp.bfloat16)
    y, vjp = jax.vjp(norm(kind), x)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= x.size]
    assert y.dtype == jnp.bfloat16
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(x.shape, x.dtype)]
