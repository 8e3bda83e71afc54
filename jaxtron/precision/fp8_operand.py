"""Activations and gradients as FP8 matrices, the operands of products (``fp8_product.py``).

Rows in parts have one scale. That of parts that *arrive* (``parallel/tensor_parts.py``) comes from
what the members of ``tensor`` begin with, each its own: nothing waits for another's part.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.precision import fp8_te
from jaxtron.precision.fp8_weight import Fp8Weight
from jaxtron.precision.quantise import amax, quantise, scale_of


class Operand(NamedTuple):
    """A matrix of activations or gradients in FP8.

    Attributes:
        bits: uint8 ``[m, n]``.
        scale: of the values.
        largest: magnitude before the cast, if it was asked for.
    """

    bits: jax.Array
    scale: jax.Array
    largest: jax.Array | None

    def kept(self) -> "Operand":
        """What a backward pass reads: transposed."""
        return self._replace(bits=self.bits.T)


def operands(
    weight: Fp8Weight,
    parts: Sequence[Sequence[jax.Array]],
    *,
    gradient: bool,
    arrives: bool = False,
    compute: Callable[..., Sequence[jax.Array]] | None = None,
) -> list[Operand]:
    """Matrices in FP8 by one scale: a product's input in parts, or the gradient of its output.

    Args:
        weight: of the product.
        parts: of the rows; per part matrices ``[m, n_i]``, to be put side by side, or what
            ``compute`` takes.
        gradient: which of the two it is.
        arrives: whether parts behind the first come from other members of ``tensor``.
        compute: gives the matrices. It is called twice, for the largest magnitude and for the cast:
            what is cheap to compute costs less so than written once and read back.
    """
    site, recipe = weight.site, weight.site.recipe
    dtype = recipe.backward if gradient else recipe.forward
    made = measured = list(parts)
    if compute is not None:
        made = measured = [compute(*part) for part in parts]
        if recipe.backend == "xla":  # behind a barrier, or XLA would see that both are the same
            measured = [compute(*lax.optimization_barrier(tuple(part))) for part in parts]
    if weight.scales is None:
        axes = site.gradient_axes if gradient else site.input_axes
        if arrives and len(parts) > 1:
            largest, axes = _amax(measured[0]), tuple(dict.fromkeys((*axes, "tensor")))
        else:
            largest = functools.reduce(jnp.maximum, map(_amax, measured))
        scale = scale_of(lax.pmax(largest, axes) if axes else largest, dtype)
    else:
        scale = weight.scales[int(gradient)]
    return [_cast(weight, *each, scale, dtype) for each in zip(made, measured, strict=True)]


def _cast(
    weight: Fp8Weight,
    matrices: Sequence[jax.Array],
    measured: Sequence[jax.Array],
    scale: jax.Array,
    dtype: Any,
) -> Operand:
    if weight.site.recipe.backend == "te":
        bits, met = fp8_te.cast(_side_by_side(matrices), scale, dtype)
    else:
        bits = _side_by_side([quantise(matrix, scale, dtype) for matrix in matrices])
        met = _amax(measured)
    # Behind a barrier, because XLA would cast and transpose in one kernel, which takes longer than
    # two: it transposes bytes fast, and what it computes on the way slowly.
    return Operand(lax.optimization_barrier(bits), scale, None if weight.scales is None else met)


def _amax(parts: Sequence[jax.Array]) -> jax.Array:
    """Largest magnitude of matrices; those of one shape are reduced in one pass."""
    shapes = {part.shape for part in parts}
    return functools.reduce(
        jnp.maximum,
        [
            amax(functools.reduce(jnp.maximum, [jnp.abs(p) for p in parts if p.shape == shape]))
            for shape in sorted(shapes)
        ],
    )


def _side_by_side(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
