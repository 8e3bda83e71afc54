"""Matrix products of FP8 operands, forward and backward.

Of ``y = x w`` all three products take FP8 operands: ``y = x w``, ``dx = g wᵀ`` and ``dw = xᵀ g``.
Input and weight are in the recipe's forward format, the gradient ``g`` in its backward format. Sums
and results are in the dtype of ``x``, ``dw`` is in fp32. What the backward pass keeps of ``x`` is
its FP8 form.

Hopper multiplies FP8 matrices only when both operands have the summed dimension last. Therefore a
weight comes in both orientations, and ``x`` and ``g`` are cast into both at once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.precision.fp8_weight import Fp8Gradient, Fp8Weight
from jaxtron.precision.quantise import amax, quantise, scale_of, values_of

Own = tuple[Callable[[jax.Array, int], jax.Array], int]


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Static part of a product: input dimensions, and each weight's part that is used."""

    inputs: int
    own: tuple[Own | None, ...]

    def take(self, i: int, w: jax.Array, outputs_at: int) -> jax.Array:
        """The used part of weight ``i``, whose output dimensions begin at ``outputs_at``."""
        own = self.own[i]
        return w if own is None else own[0](w, outputs_at + own[1])

    def rows(self, weights: Sequence[Fp8Weight]) -> jax.Array:
        """All weights as one ``[out, in]`` matrix."""
        parts = []
        for i, w in enumerate(weights):
            size = math.prod(w.shape[: self.inputs])
            if w.transposed is None:
                parts.append(self.take(i, w.values, self.inputs).reshape(size, -1).T)
            else:
                parts.append(self.take(i, w.transposed, 0).reshape(-1, size))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)

    def columns(self, weights: Sequence[Any]) -> jax.Array:
        """All weights ``[*in, *out_i]`` as one ``[in, out]`` matrix."""
        parts = []
        for i, w in enumerate(weights):
            size = math.prod(w.shape[: self.inputs])
            parts.append(self.take(i, w, self.inputs).reshape(size, -1))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def outputs(self, weights: Sequence[Any]) -> list[tuple[int, ...]]:
        """``out_i`` of each weight's used part."""
        return [
            jax.eval_shape(
                lambda a, i=i: self.take(i, a, self.inputs),
                jax.ShapeDtypeStruct(w.shape, jnp.float32),
            ).shape[self.inputs :]
            for i, w in enumerate(weights)
        ]


def fp8_linear(
    x: jax.Array,
    weights: Sequence[Fp8Weight],
    *,
    inputs: int,
    own: tuple[Own | None, ...],
) -> tuple[jax.Array, ...]:
    """``x @ w`` for each of ``weights``; see :func:`jaxtron.layers.linear.linear`."""
    gradients = tuple(w.gradient for w in weights)
    constants = tuple(dataclasses.replace(w, gradient=None) for w in weights)
    return _product(_Shape(inputs, own), x, constants, gradients)


def fp8_matmul(
    on_gpu: bool,
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    dtype: Any,
    *,
    precise: bool,
) -> jax.Array:
    """``scale_a scale_b · a bᵀ`` of ``a [m, k]`` and ``b [n, k]``, in ``dtype [m, n]``.

    Args:
        on_gpu: as an FP8 product in hardware; otherwise in fp32 with the same FP8 values.
        a: FP8.
        b: FP8.
        scale_a: of ``a``; a bf16 number in fp32.
        scale_b: of ``b``, likewise.
        dtype: of the result.
        precise: add up in full fp32; otherwise the tensor cores' faster, shorter accumulation may
            be used (as in Transformer Engine: fast forward, precise backward).
    """
    dims = (((1,), (1,)), ((), ()))
    if not on_gpu:
        exact = lax.Precision.HIGHEST
        y = lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), dims, precision=exact)
        return (y * (scale_a * scale_b)).astype(dtype)
    # XLA's GEMM rewriter turns this form into one cuBLASLt FP8 call that applies the scales to its
    # fp32 sums; nothing is dequantised. Precision HIGHEST is how it is told not to sum fast.
    wide = jnp.bfloat16
    return lax.dot_general(
        a.astype(wide) * scale_a.astype(wide),
        b.astype(wide) * scale_b.astype(wide),
        dims,
        precision=lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT,
        preferred_element_type=dtype,
    )


def _largest(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    local = amax(x)
    return lax.pmax(local, axes) if axes else local


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    shape: _Shape, x: jax.Array, weights: tuple[Fp8Weight, ...], gradients: tuple[Fp8Gradient, ...]
) -> tuple[jax.Array, ...]:
    return _product_fwd(shape, x, weights, gradients)[0]


def _product_fwd(
    shape: _Shape, x: jax.Array, weights: tuple[Fp8Weight, ...], gradients: tuple[Fp8Gradient, ...]
) -> tuple[tuple[jax.Array, ...], Any]:
    first, lead = weights[0], x.shape[: x.ndim - shape.inputs]
    recipe = first.site.recipe
    matrix = x.reshape(math.prod(lead), -1)
    largest = None
    if first.scales is None:
        scale = scale_of(_largest(matrix, first.site.input_axes), recipe.forward)
    else:
        scale = first.scales[0]
        largest = amax(matrix)
    q = quantise(matrix, scale, recipe.forward)
    y = fp8_matmul(
        recipe.on_gpu,
        values_of(q, recipe.forward),
        values_of(shape.rows(weights), recipe.forward),
        scale,
        first.scale,
        x.dtype,
        precise=False,
    )
    outputs = shape.outputs(weights)
    pieces = lax.split(y, [math.prod(o) for o in outputs], axis=1)
    result = tuple(p.reshape(*lead, *o) for p, o in zip(pieces, outputs, strict=True))
    return result, (q.T, scale, largest, weights)


def _product_bwd(shape: _Shape, residuals: Any, cotangents: tuple[jax.Array, ...]) -> Any:
    qx, scale_x, largest_x, weights = residuals
    first, outputs = weights[0], shape.outputs(weights)
    recipe = first.site.recipe
    lead = cotangents[0].shape[: cotangents[0].ndim - len(outputs[0])]
    parts = [c.reshape(math.prod(lead), -1) for c in cotangents]
    g = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    measured = None
    if first.scales is None:
        scale_g = scale_of(_largest(g, first.site.gradient_axes), recipe.backward)
    else:
        scale_g = first.scales[1]
        measured = jnp.stack([largest_x, amax(g)])
    q = quantise(g, scale_g, recipe.backward)
    joined = shape.columns([w.values for w in weights])
    dx = fp8_matmul(
        recipe.on_gpu,
        values_of(q, recipe.backward),
        values_of(joined, recipe.forward),
        scale_g,
        first.scale,
        g.dtype,
        precise=True,
    )
    dw = fp8_matmul(
        recipe.on_gpu,
        values_of(qx, recipe.forward),
        values_of(q.T, recipe.backward),
        scale_x,
        scale_g,
        jnp.float32,
        precise=True,
    )
    like = [jax.ShapeDtypeStruct(w.shape, jnp.float32) for w in weights]
    (dweights,) = jax.linear_transpose(shape.columns, like)(dw)
    gradients = tuple(Fp8Gradient(d, measured) for d in dweights)
    inputs = first.shape[: shape.inputs]
    return dx.reshape(*lead, *inputs), None, gradients


_product.defvjp(_product_fwd, _product_bwd)
