"""What a grouped matrix product is asked to compute, and what a kernel backend offers."""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class GroupedMatmulSpec:
    """The static side of an MoE block's products, in local (per device) sizes.

    Attributes:
        rows: rows of the buffer, all groups together.
        experts: groups.
        inner: width of the rows.
        outer: inner width of an expert.
        dtype: of rows and weights.
        expected: rows of a group when loads are balanced.
        most: rows of a group at most; None: no limit but ``rows``.
    """

    rows: int
    experts: int
    inner: int
    outer: int
    dtype: jnp.dtype
    expected: int
    most: int | None


class GroupedMatmul(Protocol):
    """A kernel for ``out[m] = rows[m] @ weights[group of m]``.

    Attributes:
        name: as ``model.moe_grouped_gemm_backend`` spells it.
        strided: whether every group has the same number of slots; otherwise groups follow each
            other.
        row_tile: groups that follow each other begin at multiples of this; slots between them are
            zero.
    """

    name: str
    strided: bool
    row_tile: int

    def supports(self, spec: GroupedMatmulSpec, platform: str) -> str | None:
        """None if the kernel computes ``spec`` well on ``platform``, else the reason why not."""

    def __call__(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """Multiply.

        Args:
            rows: ``[M, K]``; unused slots among the groups are zero, and what is in tiles behind
                the last group changes nothing.
            weights: ``[groups, K, N]``.
            sizes: int32 ``[groups]``, rows in use of each group.

        Returns:
            ``[M, N]`` in the dtype of ``rows``; unused slots are zero, but those in tiles behind
            the last group may hold anything. The gradient of an empty group's weights is exactly
            zero.
        """
