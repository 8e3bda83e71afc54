"""Matrix products of FP8 operands, forward and backward.

Of ``y = x w`` all three products take FP8 operands: ``y = x w``, ``dx = g wᵀ`` and ``dw = xᵀ g``.
Input and weight are in the recipe's forward format, the gradient ``g`` in its backward format. Sums
and results are in the dtype of ``x``, ``dw`` is in fp32. What the backward pass keeps of ``x`` is
its FP8 form.

Rows may come in parts, some of them before the others (``parallel/tensor_parts.py``): all have one
scale (``fp8_operand.py``), and the results are those of the rows together.

Hopper multiplies FP8 matrices only when both operands have the summed dimension last. Therefore a
weight comes in both orientations, and ``x`` and ``g`` are transposed after the cast.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.precision import fp8_te
from jaxtron.precision.fp8_operand import Operand, operands
from jaxtron.precision.fp8_weight import Fp8Gradient, Fp8Recipe, Fp8Weight
from jaxtron.precision.quantise import values_of

Arrives = Literal["input", "gradient"]
Own = tuple[Callable[[jax.Array, int], jax.Array], int]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static part of a product.

    Attributes:
        inputs: input dimensions.
        own: each weight's part that is used.
        arrives: which matrix arrives in parts, if there are several: what the product reads, or
            the gradient of what it gives.
    """

    inputs: int
    own: tuple[Own | None, ...]
    arrives: Arrives | None = None

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
    parts: Sequence[jax.Array],
    weights: Sequence[Fp8Weight],
    *,
    inputs: int,
    own: tuple[Own | None, ...],
    arrives: Arrives | None,
) -> list[tuple[jax.Array, ...]]:
    """``x @ w`` for each of ``parts`` and ``weights``; see :func:`jaxtron.layers.linear.linear`."""
    gradients = tuple(w.gradient for w in weights)
    constants = tuple(dataclasses.replace(w, gradient=None) for w in weights)
    return _product(Shape(inputs, own, arrives), tuple(parts), constants, gradients)


def fp8_matmul(
    recipe: Fp8Recipe,
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
        recipe: who multiplies, and whether in hardware; otherwise in fp32 with the same values.
        a: FP8.
        b: FP8.
        scale_a: of ``a``; a bf16 number in fp32.
        scale_b: of ``b``, likewise.
        dtype: of the result.
        precise: add up in full fp32; otherwise the tensor cores' faster, shorter accumulation may
            be used (as in Transformer Engine: fast forward, precise backward).
    """
    if recipe.backend == "te":
        return fp8_te.matmul(a, b, scale_a, scale_b, dtype, precise=precise)
    dims = (((1,), (1,)), ((), ()))
    if not recipe.on_gpu:
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


def forward(shape: Shape, x: Operand, weights: Sequence[Fp8Weight], dtype: Any) -> list[jax.Array]:
    """``x @ w`` for each of ``weights``, ``[m, *out_i]`` in ``dtype``."""
    recipe = weights[0].site.recipe
    y = fp8_matmul(
        recipe,
        values_of(x.bits, recipe.forward),
        values_of(shape.rows(weights), recipe.forward),
        x.scale,
        weights[0].scale,
        dtype,
        precise=False,
    )
    outputs = shape.outputs(weights)
    pieces = lax.split(y, [math.prod(o) for o in outputs], axis=1)
    return [p.reshape(-1, *o) for p, o in zip(pieces, outputs, strict=True)]


def backward(
    shape: Shape,
    xs: Sequence[Operand],
    gs: Sequence[Operand],
    weights: Sequence[Fp8Weight],
    dtype: Any,
) -> tuple[list[jax.Array], tuple[Fp8Gradient, ...]]:
    """Derivatives of a product by its input, ``[m, in]`` a part in ``dtype``, and by its weights.

    Args:
        shape: of the product.
        xs: its input in parts, as :meth:`Operand.kept`.
        gs: gradients of its outputs side by side, in the same parts.
        weights: its weights.
        dtype: of the input.
    """
    each = [_backward(shape, x, g, weights, dtype) for x, g in zip(xs, gs, strict=True)]
    summed = functools.reduce(jnp.add, (dw for _, dw in each))
    like = [jax.ShapeDtypeStruct(w.shape, jnp.float32) for w in weights]
    (dweights,) = jax.linear_transpose(shape.columns, like)(summed)
    largest = [
        [each.largest for each in operand if each.largest is not None] for operand in (xs, gs)
    ]
    measured = None
    if all(largest):
        measured = jnp.stack([functools.reduce(jnp.maximum, each) for each in largest])
    return [dx for dx, _ in each], tuple(Fp8Gradient(d, measured) for d in dweights)


def _backward(
    shape: Shape, x: Operand, g: Operand, weights: Sequence[Fp8Weight], dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Of one part: ``[m, in]`` in ``dtype``, and ``[in, out]`` of all weights, fp32."""
    recipe = weights[0].site.recipe
    joined = shape.columns([w.values for w in weights])
    dx = fp8_matmul(
        recipe,
        values_of(g.bits, recipe.backward),
        values_of(joined, recipe.forward),
        g.scale,
        weights[0].scale,
        dtype,
        precise=True,
    )
    dw = fp8_matmul(
        recipe,
        values_of(x.bits, recipe.forward),
        values_of(g.bits.T, recipe.backward),
        x.scale,
        g.scale,
        jnp.float32,
        precise=True,
    )
    return dx, dw


Parts = tuple[jax.Array, ...]
Weights = tuple[Fp8Weight, ...]
Gradients = tuple[Fp8Gradient, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(shape: Shape, xs: Parts, weights: Weights, gradients: Gradients) -> list[Parts]:
    return _product_fwd(shape, xs, weights, gradients)[0]


def _product_fwd(
    shape: Shape, xs: Parts, weights: Weights, gradients: Gradients
) -> tuple[list[Parts], Any]:
    leads = [x.shape[: x.ndim - shape.inputs] for x in xs]
    rows = [(x.reshape(math.prod(lead), -1),) for x, lead in zip(xs, leads, strict=True)]
    qs = operands(weights[0], rows, gradient=False, arrives=shape.arrives == "input")
    outputs = [
        tuple(y.reshape(*lead, *y.shape[1:]) for y in forward(shape, q, weights, xs[0].dtype))
        for q, lead in zip(qs, leads, strict=True)
    ]
    return outputs, ([q.kept() for q in qs], weights)


def _product_bwd(shape: Shape, residuals: Any, cotangents: list[Parts]) -> Any:
    xs, weights = residuals
    dims = len(shape.outputs(weights)[0])
    leads = [each[0].shape[: each[0].ndim - dims] for each in cotangents]
    rows = [
        [c.reshape(math.prod(lead), -1) for c in each]
        for each, lead in zip(cotangents, leads, strict=True)
    ]
    gs = operands(weights[0], rows, gradient=True, arrives=shape.arrives == "gradient")
    dxs, gradients = backward(shape, xs, gs, weights, rows[0][0].dtype)
    within = weights[0].shape[: shape.inputs]
    return (
        tuple(dx.reshape(*lead, *within) for dx, lead in zip(dxs, leads, strict=True)),
        None,
        gradients,
    )


_product.defvjp(_product_fwd, _product_bwd)
