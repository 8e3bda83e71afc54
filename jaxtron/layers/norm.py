"""RMSNorm and LayerNorm."""

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
    """

    def __init__(self, config: ModelConfig, size: int, axis: str = "embed") -> None:
        self.epsilon = config.layernorm_epsilon
        self.centered = config.normalization == "LayerNorm"
        self.weight = ones((size,), (axis,))
        if self.centered:
            self.bias = zeros((size,), (axis,))

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """Normalise ``x [..., size]``; the result has ``dtype``, by default that of ``x``."""
        y = x.astype(jnp.float32)
        if self.centered:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        y = y * self.weight[...]
        if self.centered:
            y = y + self.bias[...]
        return y.astype(dtype or x.dtype)
