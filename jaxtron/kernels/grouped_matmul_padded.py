"""Grouped matrix products as one batched product over groups of equal size."""

import jax
import jax.numpy as jnp

from jaxtron.kernels.grouped_matmul_spec import (
    Fp8GroupedMatmul,
    GroupedMatmulSpec,
    RowKernels,
    add_gradient,
)


class PaddedGroupedMatmul:
    """Every expert multiplies as many rows as its capacity, used or not.

    The rows lie with that stride already, so nothing is moved: cuBLAS's batched product.
    """

    name = "padded"
    strided = True
    row_tile = 1
    fp8: Fp8GroupedMatmul | None = None
    row_kernels: RowKernels | None = None

    def supports(self, spec: GroupedMatmulSpec, platform: str) -> str | None:
        """Anything with a limit on the rows of an expert."""
        if spec.fp8:
            return "it has no FP8 products"
        if spec.most is None:
            return (
                "without a capacity (model.moe_expert_capacity_factor is null) every expert would "
                "multiply all rows"
            )
        return None

    def __call__(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """See :class:`GroupedMatmul`."""
        groups = rows.reshape(weights.shape[0], -1, rows.shape[-1])
        return jnp.einsum("gmk,gkn->gmn", groups, weights).reshape(-1, weights.shape[-1])

    def add_rows_times_rows(
        self, total: jax.Array, a: jax.Array, b: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        """See :class:`GroupedMatmul`."""
        return add_gradient(self, total, a, b, sizes)
