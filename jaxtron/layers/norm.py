"""RMSNorm and LayerNorm."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtron.layers.parameter import ones, zeros
from jaxtron.models.config import ModelConfig


class Norm(nnx.Module):
    """Normalisation over the last axis, statistics in fp32.

    RMSNorm: ``x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich 2019, arXiv:1910.07467).
    LayerNorm: ``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016, arXiv:1607.06450).

    The backward pass keeps ``x`` as it came and one fp32 number a row: derived by JAX it would keep
    fp32 forms of ``x``, which a pipeline stores for every microbatch in flight.
    """

    def __init__(self, config: ModelConfig, size: int, axis: str = "embed") -> None:
        self.epsilon = config.layernorm_epsilon
        self.centered = config.normalization == "LayerNorm"
        self.weight = ones((size,), (axis,))
        if self.centered:
            self.bias = zeros((size,), (axis,))

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """Normalise ``x [..., size]``; the result has ``dtype``, by default that of ``x``."""
        dtype = jnp.dtype(dtype or x.dtype)
        if self.centered:
            return _layer_norm(self.epsilon, dtype, x, self.weight[...], self.bias[...])
        return _rms_norm(self.epsilon, dtype, x, self.weight[...])


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=-1, keepdims=True)


def _over_rows(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rms_norm(epsilon: float, dtype: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _rms_norm_fwd(epsilon, dtype, x, weight)[0]


def _rms_norm_fwd(epsilon: float, dtype: Any, x: jax.Array, weight: jax.Array) -> Any:
    y = x.astype(jnp.float32)
    scale = lax.rsqrt(_mean(y * y) + epsilon)
    return (y * scale * weight).astype(dtype), (x, scale, weight)


def _rms_norm_bwd(epsilon: float, dtype: Any, residuals: Any, g: jax.Array) -> Any:
    x, scale, weight = residuals
    unit, g = x.astype(jnp.float32) * scale, g.astype(jnp.float32)
    slope = g * weight
    dx = scale * (slope - unit * _mean(slope * unit))
    return dx.astype(x.dtype), _over_rows(g * unit)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _layer_norm(
    epsilon: float, dtype: Any, x: jax.Array, weight: jax.Array, bias: jax.Array
) -> jax.Array:
    return _layer_norm_fwd(epsilon, dtype, x, weight, bias)[0]


def _layer_norm_fwd(
    epsilon: float, dtype: Any, x: jax.Array, weight: jax.Array, bias: jax.Array
) -> Any:
    y = x.astype(jnp.float32)
    mean = _mean(y)
    y = y - mean
    scale = lax.rsqrt(_mean(y * y) + epsilon)
    return (y * scale * weight + bias).astype(dtype), (x, mean, scale, weight)


def _layer_norm_bwd(epsilon: float, dtype: Any, residuals: Any, g: jax.Array) -> Any:
    x, mean, scale, weight = residuals
    unit, g = (x.astype(jnp.float32) - mean) * scale, g.astype(jnp.float32)
    slope = g * weight
    dx = scale * (slope - _mean(slope) - unit * _mean(slope * unit))
    return dx.astype(x.dtype), _over_rows(g * unit), _over_rows(g)


_layer_norm.defvjp(_layer_norm_fwd, _layer_norm_bwd)
