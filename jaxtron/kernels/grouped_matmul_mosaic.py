"""Grouped matrix products with kernels for Hopper, whose work follows the routing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxtron.kernels import grouped_matmul_hopper_fp8 as hopper_fp8
from jaxtron.kernels.grouped_matmul_hopper import (
    COLUMN_TILE,
    ROW_TILE,
    multiprocessors,
    rows_times_rows,
    rows_times_weights,
)
from jaxtron.kernels.grouped_matmul_spec import Fp8GroupedMatmul, GroupedMatmulSpec, RowKernels
from jaxtron.kernels.rows_hopper import ACTIVATIONS, gated_rows, gated_rows_gradient, placed_rows


class MosaicFp8GroupedMatmul:
    """See :class:`jaxtron.kernels.grouped_matmul_spec.Fp8GroupedMatmul`; results are bf16."""

    def rows_times_weights(
        self, rows: jax.Array, weights: jax.Array, sizes: jax.Array, scale: jax.Array, dtype: Any
    ) -> jax.Array:
        """See :class:`Fp8GroupedMatmul`."""
        out = hopper_fp8.rows_times_weights(rows, weights, sizes, scale, blocks=multiprocessors())
        return out.astype(dtype)

    def rows_times_rows(
        self, a: jax.Array, b: jax.Array, sizes: jax.Array, scale: jax.Array
    ) -> jax.Array:
        """See :class:`Fp8GroupedMatmul`."""
        return hopper_fp8.rows_times_rows(a, b, sizes, scale, blocks=multiprocessors())


class MosaicRowKernels:
    """See :class:`jaxtron.kernels.grouped_matmul_spec.RowKernels`; bf16, aligned to 128."""

    activations = frozenset(ACTIVATIONS)

    def gated(self, u: jax.Array, sizes: jax.Array, activation: str) -> jax.Array:
        """See :class:`RowKernels`."""
        return _gated(activation, u, sizes)

    def place(
        self,
        x: jax.Array,
        source: jax.Array,
        sizes: jax.Array,
        topk: int,
        weights: jax.Array | None = None,
    ) -> jax.Array:
        """See :class:`RowKernels`."""
        flat = None if weights is None else weights.reshape(-1)
        return placed_rows(x, source, sizes, flat, topk=topk, blocks=multiprocessors())


class MosaicGroupedMatmul:
    """Pallas kernels (Mosaic GPU) for H100 and H200."""

    name = "mosaic_gpu"
    strided = False
    row_tile = ROW_TILE
    fp8: Fp8GroupedMatmul | None = MosaicFp8GroupedMatmul()
    row_kernels: RowKernels | None = MosaicRowKernels()

    def supports(self, spec: GroupedMatmulSpec, platform: str) -> str | None:
        """bf16 in whole tiles on compute capability 9.0."""
        if platform != "gpu":
            return f"it runs on GPUs of compute capability 9.0, and this is a {platform}"
        capability = str(getattr(jax.devices()[0], "compute_capability", ""))
        if capability != "9.0":
            return f"it runs on compute capability 9.0, and this GPU has {capability}"
        if spec.dtype != jnp.bfloat16:
            return f"it multiplies bf16, and precision.compute gives {spec.dtype}"
        odd = [width for width in (spec.inner, spec.outer) if width % COLUMN_TILE]
        if odd:
            return f"widths must be multiples of {COLUMN_TILE}, and one is {odd[0]}"
        return None

    def __call__(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """See :class:`GroupedMatmul`."""
        return _matmul(rows, weights, sizes)

    def add_rows_times_rows(
        self, total: jax.Array, a: jax.Array, b: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        """See :class:`GroupedMatmul`."""
        return rows_times_rows(a, b, sizes, total, blocks=multiprocessors())


def _weighted(rows: jax.Array, weights: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
    return rows_times_weights(rows, weights, sizes, transposed=transposed, blocks=multiprocessors())


@jax.custom_vjp
def _matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _weighted(rows, weights, sizes, False)


def _forward(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
    return _matmul(rows, weights, sizes), (rows, weights, sizes)


def _backward(residuals: Any, g: jax.Array) -> Any:
    rows, weights, sizes = residuals
    d_rows = _weighted(g, weights, sizes, True)
    d_weights = rows_times_rows(rows, g, sizes, blocks=multiprocessors())
    return d_rows, d_weights.astype(weights.dtype), None


_matmul.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: str, u: jax.Array, sizes: jax.Array) -> jax.Array:
    return gated_rows(u, sizes, activation=activation, blocks=multiprocessors())


def _gated_forward(activation: str, u: jax.Array, sizes: jax.Array) -> Any:
    return _gated(activation, u, sizes), (u, sizes)


def _gated_backward(activation: str, residuals: Any, g: jax.Array) -> Any:
    u, sizes = residuals
    d_u = gated_rows_gradient(u, g, sizes, activation=activation, blocks=multiprocessors())
    return d_u, None


_gated.defvjp(_gated_forward, _gated_backward)
