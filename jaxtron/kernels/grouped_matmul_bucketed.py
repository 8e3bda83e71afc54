"""Dropless grouped matrix products as a batched product whose size follows the largest group.

The program holds the batched product for several group sizes and takes, step by step, the smallest
that the fullest expert fits in. Balanced loads waste nothing; an expert with twice the mean load
doubles the work. Loads beyond the largest size are computed expert by expert over all rows: slow,
but exact and without the memory that a batched product of that size would need.
"""

import functools
from collections.abc import Callable
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

BUCKETS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Group sizes relative to balanced loads."""
ALIGNMENT = 8


class BucketedGroupedMatmul:
    """See the module's text; made for one ``expected`` group size by :meth:`fitted`."""

    name = "bucketed"
    strided = False
    row_tile = 1
    fp8: Fp8GroupedMatmul | None = None
    row_kernels: RowKernels | None = None

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self.sizes = sizes

    def supports(self, spec: GroupedMatmulSpec, platform: str) -> str | None:
        """Everything but FP8."""
        return "it has no FP8 products" if spec.fp8 else None

    def fitted(self, spec: GroupedMatmulSpec) -> "BucketedGroupedMatmul":
        """The kernel with its buckets for ``spec``."""
        most = spec.rows if spec.most is None else min(spec.most, spec.rows)
        aligned = (-(-int(spec.expected * f) // ALIGNMENT) * ALIGNMENT for f in BUCKETS)
        return BucketedGroupedMatmul(tuple(sorted({min(size, most) for size in aligned})))

    def __call__(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """See :class:`GroupedMatmul`."""
        return _matmul(rows, weights, sizes, self.sizes)

    def add_rows_times_rows(
        self, total: jax.Array, a: jax.Array, b: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        """See :class:`GroupedMatmul`."""
        return add_gradient(self, total, a, b, sizes)


def _switch(
    sizes: jax.Array, buckets: tuple[int, ...], batched: Callable[..., Any], serial: Any, *args: Any
) -> jax.Array:
    """The branch of the smallest bucket that holds the largest group."""
    which = jnp.searchsorted(jnp.asarray(buckets, jnp.int32), jnp.max(sizes))
    branches = [functools.partial(batched, bucket) for bucket in buckets]
    return lax.switch(which, [*branches, serial], *args)


def _padded(rows: jax.Array, sizes: jax.Array, bucket: int) -> jax.Array:
    """``[groups, bucket, K]`` from packed rows, zeros behind each group."""
    starts = jnp.cumsum(sizes) - sizes
    within = jnp.arange(bucket)
    index = jnp.where(within < sizes[:, None], starts[:, None] + within, rows.shape[0])
    return rows.at[index].get(mode="fill", fill_value=0)


def _group_of(sizes: jax.Array, count: int) -> jax.Array:
    """Group of every packed row; the number of groups for unused ones."""
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(count), side="right")


def _packed(padded: jax.Array, sizes: jax.Array, count: int) -> jax.Array:
    """The inverse of :func:`_padded`."""
    groups, bucket, width = padded.shape
    group = _group_of(sizes, count)
    starts = jnp.cumsum(sizes) - sizes
    index = group * bucket + jnp.arange(count) - starts.at[group].get(mode="clip")
    index = jnp.where(group < groups, index, groups * bucket)
    return padded.reshape(-1, width).at[index].get(mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _matmul(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, buckets: tuple[int, ...]
) -> jax.Array:
    return _product(rows, weights, sizes, buckets, "gmk,gkn->gmn", "mk,kn->mn")


def _product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    buckets: tuple[int, ...],
    batched_form: str,
    serial_form: str,
) -> jax.Array:
    count = rows.shape[0]

    def batched(bucket: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        out = jnp.einsum(batched_form, _padded(rows, sizes, bucket), weights)
        return _packed(out, sizes, count)

    def serial(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        group = _group_of(sizes, count)[:, None]

        def body(out: jax.Array, each: Any) -> Any:
            number, weight = each
            return jnp.where(group == number, jnp.einsum(serial_form, rows, weight), out), None

        width = jax.eval_shape(functools.partial(jnp.einsum, serial_form), rows, weights[0]).shape[
            1
        ]
        start = jnp.zeros((count, width), rows.dtype)
        return lax.scan(body, start, (jnp.arange(weights.shape[0]), weights))[0]

    return _switch(sizes, buckets, batched, serial, rows, weights, sizes)


def _forward(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, buckets: tuple[int, ...]
) -> Any:
    return _matmul(rows, weights, sizes, buckets), (rows, weights, sizes)


def _backward(buckets: tuple[int, ...], residuals: Any, g: jax.Array) -> Any:
    rows, weights, sizes = residuals
    d_rows = _product(g, weights, sizes, buckets, "gmn,gkn->gmk", "mn,kn->mk")

    def batched(bucket: int, rows: jax.Array, g: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.einsum("gmk,gmn->gkn", _padded(rows, sizes, bucket), _padded(g, sizes, bucket))

    def serial(rows: jax.Array, g: jax.Array, sizes: jax.Array) -> jax.Array:
        group = _group_of(sizes, rows.shape[0])[:, None]

        def one(number: jax.Array) -> jax.Array:
            return jnp.einsum("mk,mn->kn", jnp.where(group == number, rows, 0), g)

        return lax.map(one, jnp.arange(sizes.shape[0]))

    d_weights = _switch(sizes, buckets, batched, serial, rows, g, sizes)
    return d_rows, d_weights.astype(weights.dtype), None


_matmul.defvjp(_forward, _backward)
