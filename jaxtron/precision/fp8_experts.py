"""Products of experts in FP8, forward and backward; see ``fp8_product.py`` for those of layers."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.kernels.grouped_matmul_spec import GroupedMatmul
from jaxtron.precision.fp8_weight import Fp8Gradient, Fp8Weight
from jaxtron.precision.quantise import amax, quantise, scale_of, values_of


def fp8_experts(
    rows: jax.Array, weight: Fp8Weight, sizes: jax.Array, kernel: GroupedMatmul
) -> jax.Array:
    """Rows times their expert's weight.

    Args:
        rows: ``[M, K]``, grouped by expert as ``kernel`` has them.
        weight: ``[experts, K, *out]``.
        sizes: int32 ``[experts]``, rows of each.
        kernel: has FP8 products.

    Returns:
        ``[M, N]`` with the output dimensions in one, in the dtype of ``rows``.
    """
    constant = dataclasses.replace(weight, gradient=None)
    return _product(kernel, rows, constant, weight.gradient, sizes)


def _matrices(values: jax.Array, inputs: int) -> jax.Array:
    """``[experts, first, second]`` of a weight whose first ``inputs`` dimensions make ``first``."""
    return values.reshape(values.shape[0], math.prod(values.shape[1 : 1 + inputs]), -1)


def _in_use(x: jax.Array, sizes: jax.Array, kernel: GroupedMatmul) -> jax.Array:
    """``x [M, ...]`` with zeros in tiles behind the last group, where kernels leave anything."""
    if kernel.strided or kernel.row_tile == 1:
        return x
    used = jnp.sum((sizes + kernel.row_tile - 1) // kernel.row_tile) * kernel.row_tile
    return jnp.where(jnp.arange(x.shape[0])[:, None] < used, x, 0)


def _quantised(
    x: jax.Array, given: jax.Array | None, dtype: Any, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bits, scale and largest magnitude."""
    largest = amax(x)
    if given is not None:
        return quantise(x, given, dtype), given, largest
    scale = scale_of(lax.pmax(largest, axes) if axes else largest, dtype)
    return quantise(x, scale, dtype), scale, largest


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    kernel: GroupedMatmul,
    rows: jax.Array,
    weight: Fp8Weight,
    gradient: Fp8Gradient | None,
    sizes: jax.Array,
) -> jax.Array:
    return _product_fwd(kernel, rows, weight, gradient, sizes)[0]


def _product_fwd(
    kernel: GroupedMatmul,
    rows: jax.Array,
    weight: Fp8Weight,
    gradient: Fp8Gradient | None,
    sizes: jax.Array,
) -> tuple[jax.Array, Any]:
    assert kernel.fp8 is not None
    site = weight.site
    x = _in_use(rows, sizes, kernel)
    given = None if weight.scales is None else weight.scales[0]
    q, scale, largest = _quantised(x, given, site.recipe.forward, site.input_axes)
    if weight.transposed is None:
        w = jnp.swapaxes(_matrices(weight.values, site.inputs), 1, 2)
    else:
        w = _matrices(weight.transposed, weight.transposed.ndim - 1 - site.inputs)
    y = kernel.fp8.rows_times_weights(
        values_of(q, site.recipe.forward),
        values_of(w, site.recipe.forward),
        sizes,
        scale * weight.scale,
        rows.dtype,
    )
    return y, (q.T, scale, largest, weight, sizes)


def _product_bwd(kernel: GroupedMatmul, residuals: Any, g: jax.Array) -> Any:
    assert kernel.fp8 is not None
    qx, scale_x, largest_x, weight, sizes = residuals
    forward, backward = weight.site.recipe.forward, weight.site.recipe.backward
    given = None if weight.scales is None else weight.scales[1]
    axes = weight.site.gradient_axes
    q, scale_g, largest_g = _quantised(_in_use(g, sizes, kernel), given, backward, axes)
    d_rows = kernel.fp8.rows_times_weights(
        values_of(q, backward),
        values_of(_matrices(weight.values, weight.site.inputs), forward),
        sizes,
        scale_g * weight.scale,
        g.dtype,
    )
    d_weight = kernel.fp8.rows_times_rows(
        values_of(qx, forward), values_of(q.T, backward), sizes, scale_x * scale_g
    )
    measured = None if given is None else jnp.stack([largest_x, largest_g])
    gradient = Fp8Gradient(d_weight.reshape(weight.shape).astype(jnp.float32), measured)
    return d_rows, None, gradient, None


_product.defvjp(_product_fwd, _product_bwd)
