"""Sums of gradients over a step's microbatches."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtron.precision.fp8_weight import Fp8Gradient, Fp8Weight, is_fp8, is_fp8_gradient


class Uses:
    """How many operations of a trace have used a weight."""

    count = 0


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight", "total"], meta_fields=["uses"]
)
@dataclass(frozen=True)
class SummedWeight:
    """A weight whose gradient is added to the step's sum by what uses the weight.

    A microbatch has few of the vocabulary's words, and the output layer adds a chunk of tokens to
    the next anyway: so its gradient, as large as the weight, is never made for itself.

    Attributes:
        weight: ``[rows, h]``, as copied for compute.
        total: fp32 ``[rows, h]``, the sum so far. It is what is differentiated, and its cotangent
            is the sum afterwards, with an objective whose own cotangent is 1. So exactly one
            operation may use the weight (:func:`check_uses`).
        uses: operations that have.
    """

    weight: jax.Array
    total: jax.Array
    uses: Uses

    def take(self) -> tuple[jax.Array, jax.Array]:
        """Weight and sum, for the operation that adds to the sum."""
        self.uses.count += 1
        return self.weight, self.total

    @property
    def shape(self) -> tuple[int, ...]:
        """``[rows, h]``."""
        return self.weight.shape


def is_summed(leaf: Any) -> bool:
    """Whether ``leaf`` is a :class:`SummedWeight` (for ``is_leaf`` of tree functions)."""
    return isinstance(leaf, SummedWeight)


def _is_weight(leaf: Any) -> bool:
    return is_fp8(leaf) or is_summed(leaf)


def trainable(copies: Any) -> Any:
    """What to differentiate ``copies`` by.

    Of a weight in FP8 its :class:`Fp8Gradient`, of a :class:`SummedWeight` the sum, others as is.
    """

    def part(w: Any) -> Any:
        if is_fp8(w):
            return w.gradient
        return w.total if is_summed(w) else w

    return jax.tree.map(part, copies, is_leaf=_is_weight)


def with_trainable(copies: Any, part: Any) -> Any:
    """``copies`` with :func:`trainable` replaced by ``part``."""

    def put(w: Any, t: Any) -> Any:
        if is_fp8(w):
            return Fp8Weight(w.values, w.transposed, w.scale, w.scales, t, w.site)
        return SummedWeight(w.weight, t, w.uses) if is_summed(w) else t

    return jax.tree.map(put, copies, part, is_leaf=_is_weight)


def _put(tree: Any, path: str, value: Any) -> Any:
    """``tree`` with the entry at ``embedding/word`` replaced."""
    name, _, rest = path.partition("/")
    return {**tree, name: _put(tree[name], rest, value) if rest else value}


def _get(tree: Any, path: str) -> Any:
    return functools.reduce(lambda node, name: node[name], path.split("/"), tree)


def with_sums(copies: Any, total: Any, summed: Sequence[str]) -> Any:
    """``copies`` in which the weights at the paths ``summed`` carry their gradients' sums."""
    for path in summed:
        weight = SummedWeight(_get(copies, path), _get(total, path), Uses())
        copies = _put(copies, path, weight)
    return copies


def check_uses(copies: Any, summed: Sequence[str]) -> None:
    """See that an objective of :func:`with_sums` has used each of the weights ``summed`` once.

    Raises:
        ValueError: it has not, and the sums are wrong.
    """
    for path in summed:
        count = _get(copies, path).uses.count
        if count != 1:
            raise ValueError(
                f"the model's sums_itself names {path}, whose gradient's sum is right only if one "
                f"operation uses that weight, and {count} do: leave it out of sums_itself"
            )


def accumulate(total: Any, grads: Any, summed: Sequence[str] = ()) -> Any:
    """Sum of microbatches' gradients in the dtype of ``total``; maximum of what was measured.

    At the paths ``summed`` the gradients are the sums already (:func:`with_sums`).
    """

    def add(path: Any, t: Any, g: Any) -> Any:
        if jax.tree_util.keystr(path, simple=True, separator="/") in summed:
            return g
        if not is_fp8_gradient(t):
            return t + g.astype(t.dtype)
        amax = None if t.amax is None else jnp.maximum(t.amax, g.amax)
        return Fp8Gradient(t.weight + g.weight.astype(t.weight.dtype), amax)

    return jax.tree.map_with_path(add, total, grads, is_leaf=is_fp8_gradient)


def zero_gradients(shapes: Any, dtype: Any) -> Any:
    """Where :func:`accumulate` starts: gradients in ``dtype``, what was measured in fp32."""

    def zero(shape: Any) -> Any:
        if not is_fp8_gradient(shape):
            return jnp.zeros(shape.shape, dtype)
        amax = None if shape.amax is None else jnp.zeros(shape.amax.shape, jnp.float32)
        return Fp8Gradient(jnp.zeros(shape.weight.shape, dtype), amax)

    return jax.tree.map(zero, shapes, is_leaf=is_fp8_gradient)
