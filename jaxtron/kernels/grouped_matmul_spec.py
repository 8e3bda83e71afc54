"""What a grouped matrix product is asked to compute, and what a kernel backend offers."""

from dataclasses import dataclass
from typing import Any, Protocol

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
        fp8: operands of some of the products are in FP8.
    """

    rows: int
    experts: int
    inner: int
    outer: int
    dtype: jnp.dtype
    expected: int
    most: int | None
    fp8: bool = False


class Fp8GroupedMatmul(Protocol):
    """Grouped products of FP8 operands, summed in fp32.

    Both operands have the summed dimension last. Groups of rows lie as the backend's other products
    have them; unused slots are zero.
    """

    def rows_times_weights(
        self, rows: jax.Array, weights: jax.Array, sizes: jax.Array, scale: jax.Array, dtype: Any
    ) -> jax.Array:
        """``scale * rows [M, K] @ weights[group of m] [groups, N, K].T``: ``[M, N]`` in ``dtype``.

        Tiles behind the last group may hold anything.
        """

    def rows_times_rows(
        self, a: jax.Array, b: jax.Array, sizes: jax.Array, scale: jax.Array
    ) -> jax.Array:
        """``scale * a[:, rows of group] @ b[:, rows of group].T``: ``[groups, K, N]``.

        Args:
            a: ``[K, M]``.
            b: ``[N, M]``.
            sizes: int32 ``[groups]``.
            scale: fp32 scalar.

        Returns:
            fp32 or bf16; exactly zero for an empty group.
        """


class GroupedMatmul(Protocol):
    """A kernel for ``out[m] = rows[m] @ weights[group of m]``.

    Attributes:
        name: as ``model.moe_grouped_gemm_backend`` spells it.
        strided: whether every group has the same number of slots; otherwise groups follow each
            other.
        row_tile: groups that follow each other begin at multiples of this; slots between them are
            zero.
        fp8: products of FP8 operands, or None.
    """

    name: str
    strided: bool
    row_tile: int
    fp8: Fp8GroupedMatmul | None

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
