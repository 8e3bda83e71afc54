"""Sums of gradients over a step's microbatches."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtron.precision.fp8_weight import Fp8Gradient, Fp8Weight, is_fp8, is_fp8_gradient


class Uses:
    """How many operations of a trace have used a weight.

    Attributes:
        name: of the weight, as the model's ``sums_itself`` spells it.
        count: see above.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight", "total"], meta_fields=["uses"]
)
@dataclass(frozen=True)
class SummedWeight:
    """A weight whose gradient is added to the step's sum by what uses the weight.

    A microbatch has few of the vocabulary's words, and the output layer adds a chunk of tokens to
    the next anyway; experts have few tokens for each of their weights: so its gradient, as large as
    the weight, is never made for itself.

    Attributes:
        weight: as copied for compute.
        total: fp32 of the same shape, the sum so far. It is what is differentiated, and its
            cotangent is the sum afterwards, with an objective whose own cotangent is 1. So exactly
            one operation may use the weight (:func:`check_uses`).
        uses: operations that have; layers of an unrolled loop share it, so that they are traced
            once for all.
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
        """Of the weight."""
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


def _name(path: Any) -> str:
    """``layers/moe/experts/up`` of a leaf, also of one in a list of layers."""
    named = [entry for entry in path if not isinstance(entry, jax.tree_util.SequenceKey)]
    return jax.tree_util.keystr(tuple(named), simple=True, separator="/")


def with_sums(copies: Any, total: Any, summed: Sequence[str]) -> Any:
    """``copies`` in which the weights named ``summed`` carry their gradients' sums.

    Those in FP8 do not.

    Raises:
        ValueError: there is no weight of such a name.
    """
    uses = {name: Uses(name) for name in summed}
    missing = set(summed)

    def put(path: Any, w: Any, t: Any) -> Any:
        name = _name(path)
        missing.discard(name)
        return SummedWeight(w, t, uses[name]) if name in uses and not is_fp8(w) else w

    copies = jax.tree.map_with_path(put, copies, total, is_leaf=is_fp8)
    if missing:
        raise ValueError(
            f"the model's sums_itself names {', '.join(sorted(missing))}, but it has no such weight"
        )
    return copies


def _uses(tree: Any) -> list[Uses]:
    """Those of all weights that carry a sum; layers share theirs."""
    leaves = jax.tree.leaves(tree, is_leaf=is_summed)
    return list(dict.fromkeys(leaf.uses for leaf in leaves if is_summed(leaf)))


def check_uses(copies: Any) -> None:
    """See that an objective of :func:`with_sums` has used each weight that carries a sum once.

    Raises:
        ValueError: it has not, and the sums are wrong.
    """
    for uses in _uses(copies):
        if uses.count != 1:
            raise ValueError(
                f"the model's sums_itself names {uses.name}, whose gradient's sum is right only if "
                f"one operation uses that weight, and {uses.count} do: leave it out of sums_itself"
            )


def use_in_layers(layers: Any) -> None:
    """Count a use of the weights of layers, each of which is about to run once.

    What a layer does with them is checked when it is traced (:func:`used_once`), which may be once
    for all.
    """
    for uses in _uses(layers):
        uses.count += 1


@contextlib.contextmanager
def used_once(weights: Any) -> Iterator[Any]:
    """A layer's weights, and at the end a check that each with a sum was used once.

    Raises:
        ValueError: it was not, and the sums are wrong.
    """
    weights = jax.tree.map(
        lambda w: SummedWeight(w.weight, w.total, Uses(w.uses.name)) if is_summed(w) else w,
        weights,
        is_leaf=_is_weight,
    )
    yield weights
    check_uses(weights)


@jax.named_scope("gradient_sum")
def accumulate(total: Any, grads: Any, summed: Sequence[str] = ()) -> Any:
    """Sum of microbatches' gradients in the dtype of ``total``; maximum of what was measured.

    Gradients named ``summed`` are the sums already (:func:`with_sums`).
    """

    def add(path: Any, t: Any, g: Any) -> Any:
        if not is_fp8_gradient(t):
            return g if _name(path) in summed else t + g.astype(t.dtype)
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
