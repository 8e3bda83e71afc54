"""Grouped matrix products with the Hopper kernels that ship with JAX (Pallas, Mosaic GPU).

A persistent kernel walks over tiles of rows; a tile that two experts share is computed for each.
Their weights' gradient has a kernel of its own, which leaves empty groups at zero.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxtron.kernels.grouped_matmul_spec import GroupedMatmulSpec

MODULE = "jax.experimental.pallas.ops.gpu"
# Tiles that JAX's own benchmark of these kernels finds best on an H100 for products of this kind.
FORWARD = {
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "max_concurrent_steps": 4,
    "grid_block_n": 8,
}
GRADIENT = {
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "max_concurrent_steps": 4,
    "grid_block_n": 8,
}
TILE = 128


class MosaicGroupedMatmul:
    """JAX's Mosaic GPU kernels for H100 and H200."""

    name = "mosaic_gpu"
    strided = False

    def supports(self, spec: GroupedMatmulSpec, platform: str) -> str | None:
        """bf16 in whole tiles on compute capability 9.0."""
        if platform != "gpu":
            return f"it runs on GPUs of compute capability 9.0, and this is a {platform}"
        capability = str(getattr(jax.devices()[0], "compute_capability", ""))
        if capability != "9.0":
            return f"it runs on compute capability 9.0, and this GPU has {capability}"
        if spec.dtype != jnp.bfloat16:
            return f"it multiplies bf16, and precision.compute gives {spec.dtype}"
        odd = [width for width in (spec.inner, spec.outer) if width % TILE]
        if odd:
            return f"widths must be multiples of {TILE}, and one is {odd[0]}"
        try:
            _kernels()
        except ImportError as error:
            return f"this JAX does not have it ({error})"
        return None

    def __call__(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """See :class:`GroupedMatmul`."""
        return _matmul(rows, weights, sizes)


@functools.cache
def _kernels() -> tuple[Any, Any]:
    product = importlib.import_module(f"{MODULE}.ragged_dot_mgpu").ragged_dot
    gradient = importlib.import_module(f"{MODULE}.transposed_ragged_dot_mgpu")
    return product, gradient.transposed_ragged_dot


def _filled(out: jax.Array, sizes: jax.Array) -> jax.Array:
    """The kernel does not write rows past the last group."""
    used = jnp.arange(out.shape[0]) < jnp.sum(sizes)
    return jnp.where(used[:, None], out, 0)


@jax.custom_vjp
def _matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _filled(_kernels()[0](rows, weights, group_sizes=sizes, **FORWARD), sizes)


def _forward(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
    return _matmul(rows, weights, sizes), (rows, weights, sizes)


def _backward(residuals: Any, g: jax.Array) -> Any:
    rows, weights, sizes = residuals
    product, gradient = _kernels()
    d_rows = _filled(product(g, weights, group_sizes=sizes, transpose_rhs=True, **FORWARD), sizes)
    d_weights = gradient(rows, g, group_sizes=sizes, **GRADIENT)
    d_weights = jnp.where((sizes > 0)[:, None, None], d_weights, 0)
    return d_rows, d_weights.astype(weights.dtype), None


_matmul.defvjp(_forward, _backward)
