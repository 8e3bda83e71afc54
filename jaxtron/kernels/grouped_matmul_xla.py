"""Grouped matrix products with ``lax.ragged_dot``: the reference."""

import jax
from jax import lax

from jaxtron.kernels.grouped_matmul_spec import GroupedMatmulSpec


class XlaGroupedMatmul:
    """XLA's own lowering; exact zeros for empty groups and unused rows."""

    name = "xla"
    strided = False
    row_tile = 1

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
