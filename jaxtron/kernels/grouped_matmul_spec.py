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


class RowKernels(Protocol):
    """Work on rows other than products, in tiles in use only; tiles behind may hold anything.

    Attributes:
        activations: the gated ones (``model.activation``) that there are kernels for.
    """

    activations: frozenset[str]

    def gated(self, u: jax.Array, sizes: jax.Array, activation: str) -> jax.Array:
        """``act(gate) * up`` of ``u [M, 2, F]``: ``[M, F]``."""

    def place(
        self,
        x: jax.Array,
        source: jax.Array,
        sizes: jax.Array,
        topk: int,
        weights: jax.Array | None = None,
    ) -> jax.Array:
        """``out[m] = x[source[m] // topk] (* weights.flat[source[m]])``; not differentiated.

        Args:
            x: ``[N, h]``.
            source: int32 ``[M]``; ``N topk`` for an unfilled slot, which becomes zero.
            sizes: int32 ``[groups]``.
            topk: entries of a row of ``x``.
            weights: fp32 ``[N, topk]``, or None.
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
        row_kernels: what else is done with rows, or None: XLA does it with all of the buffer.
    """

    name: str
    strided: bool
    row_tile: int
    fp8: Fp8GroupedMatmul | None
    row_kernels: RowKernels | None

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

    def add_rows_times_rows(
        self, total: jax.Array, a: jax.Array, b: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        """``total + a[rows of group].T @ b[rows of group]``: the gradient of weights, added up.

        Args:
            total: fp32 ``[groups, K, N]``.
            a: ``[M, K]``, laid out and filled up like ``rows`` of a product.
            b: ``[M, N]``, its result's gradient.
            sizes: int32 ``[groups]``.

        Returns:
            fp32; exactly ``total`` for an empty group.
        """


def add_gradient(
    kernel: GroupedMatmul, total: jax.Array, a: jax.Array, b: jax.Array, sizes: jax.Array
) -> jax.Array:
    """:meth:`GroupedMatmul.add_rows_times_rows` of a gradient that is made first."""
    weights = jnp.zeros(total.shape, a.dtype)  # the product is linear in them: no values are read
    (gradient,) = jax.vjp(lambda w: kernel(a, w, sizes), weights)[1](b)
    return total + gradient.astype(total.dtype)
