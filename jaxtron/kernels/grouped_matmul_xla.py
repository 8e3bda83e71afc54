"""Grouped matrix products with ``lax.ragged_dot``: the reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.kernels.grouped_matmul_spec import (
    Fp8GroupedMatmul,
    GroupedMatmulSpec,
    RowKernels,
    add_gradient,
)


class XlaFp8GroupedMatmul:
    """FP8 values multiplied in fp32."""

    def rows_times_weights(
        self, rows: jax.Array, weights: jax.Array, sizes: jax.Array, scale: jax.Array, dtype: Any
    ) -> jax.Array:
        """See :class:`Fp8GroupedMatmul`."""
        return (_exact(rows, jnp.swapaxes(weights, 1, 2), sizes) * scale).astype(dtype)

    def rows_times_rows(
        self, a: jax.Array, b: jax.Array, sizes: jax.Array, scale: jax.Array
    ) -> jax.Array:
        """See :class:`Fp8GroupedMatmul`."""
        weights = jax.ShapeDtypeStruct((sizes.shape[0], a.shape[0], b.shape[0]), jnp.float32)
        product = jax.linear_transpose(lambda w: _exact(a.T, w, sizes), weights)
        (sums,) = product(b.T.astype(jnp.float32))
        return sums * scale


def _exact(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    operands = rows.astype(jnp.float32), weights.astype(jnp.float32)
    return lax.ragged_dot(*operands, sizes, precision=lax.Precision.HIGHEST)


class XlaGroupedMatmul:
    """XLA's own lowering; exact zeros for empty groups and unused rows."""

    name = "xla"
    strided = False
    row_tile = 1
    fp8: Fp8GroupedMatmul | None = XlaFp8GroupedMatmul()
    row_kernels: RowKernels | None = None

    def supports(self, spec: GroupedMatmulSpec, platform: str) -> str | None:
        """Everything, except on GPUs."""
        if platform != "cpu":
            return (
                f"XLA multiplies all rows with all {spec.experts} experts' weights on this "
                "platform and masks the results"
            )
        return None

    def __call__(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """See :class:`GroupedMatmul`."""
        return lax.ragged_dot(rows, weights, sizes)

    def add_rows_times_rows(
        self, total: jax.Array, a: jax.Array, b: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        """See :class:`GroupedMatmul`."""
        return add_gradient(self, total, a, b, sizes)
