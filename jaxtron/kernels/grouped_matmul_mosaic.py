"""Grouped matrix products with kernels for Hopper, whose work follows the routing."""

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
from jaxtron.kernels.grouped_matmul_spec import Fp8GroupedMatmul, GroupedMatmulSpec


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


class MosaicGroupedMatmul:
    """Pallas kernels (Mosaic GPU) for H100 and H200."""

    name = "mosaic_gpu"
    strided = False
    row_tile = ROW_TILE
    fp8: Fp8GroupedMatmul | None = MosaicFp8GroupedMatmul()

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
