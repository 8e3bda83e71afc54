"""Residuals of forward passes, kept in a ring buffer until their backward passes.

``jax.vjp`` gives the backward pass as a function whose leaves are the arrays it reads. Those that
are not the stage's own (weights, the microbatch's tables) go into a slot of the buffer. The others
are recognised by identity and are not copied: the backward pass is given them anew.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Leaf = tuple[tuple[int, ...], Any]


@dataclass
class Stretch:
    """A forward pass as traced: where each leaf of its backward pass comes from.

    Attributes:
        sources: per leaf of the backward pass, ``(known, index)``: an array that both passes are
            given, or one that is kept.
        tree: structure of the backward pass.
        entries: per kept array, its entry in the buffer.
    """

    sources: list[tuple[bool, int]] = field(default_factory=list)
    tree: Any = None
    entries: list[int] = field(default_factory=list)

    def forward(
        self, function: Callable[..., Any], primals: tuple[Any, ...], known: Sequence[Any]
    ) -> tuple[Any, Any, list[jax.Array]]:
        """Run ``function(*primals) -> (output, aux)``.

        Returns:
            ``(output, aux, kept)``: arrays to keep for :meth:`backward`.
        """
        output, vjp, aux = jax.vjp(function, *primals, has_aux=True)
        leaves, self.tree = jax.tree.flatten(vjp)
        number = {id(leaf): i for i, leaf in enumerate(known)}
        kept: dict[int, int] = {}
        self.sources = []
        arrays: list[Any] = []
        for leaf in leaves:
            if id(leaf) in number:
                self.sources.append((True, number[id(leaf)]))
                continue
            if id(leaf) not in kept:
                kept[id(leaf)] = len(arrays)
                arrays.append(leaf)
            self.sources.append((False, kept[id(leaf)]))
        return output, aux, [jnp.asarray(array) for array in arrays]

    def backward(self, cotangent: Any, known: Sequence[Any], kept: Sequence[jax.Array]) -> Any:
        """Cotangents of the primals that :meth:`forward` was given."""
        leaves = [known[i] if is_known else kept[i] for is_known, i in self.sources]
        return jax.tree.unflatten(self.tree, leaves)(cotangent)


class Ring:
    """The buffer: one array ``[slots, ...]`` per entry.

    Stretches share entries of the same shape, since a slot holds the arrays of one stretch at a
    time.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.leaves: list[Leaf] = []

    def assign(self, kept: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """Entries for the arrays of a stretch, made where no free one has the shape."""
        free = list(range(len(self.leaves)))
        entries = []
        for array in kept:
            leaf = (tuple(array.shape), array.dtype)
            entry = next((i for i in free if self.leaves[i] == leaf), None)
            if entry is None:
                entry = len(self.leaves)
                self.leaves.append(leaf)
            else:
                free.remove(entry)
            entries.append(entry)
        return entries

    def slot(self, entries: Sequence[int], kept: Sequence[jax.Array]) -> list[jax.Array]:
        """A stretch's arrays as those of a whole slot, zeros where it has none."""
        of_entry = dict(zip(entries, kept, strict=True))
        return [
            of_entry[i] if i in of_entry else jnp.zeros(shape, dtype)
            for i, (shape, dtype) in enumerate(self.leaves)
        ]

    def half(self) -> int:
        """Number of the entries, in their order, that make up about half of a slot's bytes."""
        sizes = [math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in self.leaves]
        before = itertools.accumulate(sizes, initial=0)
        return min(enumerate(before), key=lambda each: abs(2 * each[1] - sum(sizes)))[0]

    def zeros(self) -> list[jax.Array]:
        """The empty buffer."""
        return [jnp.zeros((self.slots, *shape), dtype) for shape, dtype in self.leaves]


def write(
    ring: Sequence[jax.Array], entries: Sequence[int], kept: Sequence[jax.Array], slot: jax.Array
) -> list[jax.Array]:
    """``ring`` with a stretch's arrays, or some of them, in the given entries of ``slot``."""
    ring = list(ring)
    for entry, array in zip(entries, kept, strict=True):
        ring[entry] = lax.dynamic_update_index_in_dim(ring[entry], array, slot, 0)
    return ring


def read(ring: Sequence[jax.Array], stretch: Stretch, slot: jax.Array) -> list[jax.Array]:
    """A stretch's arrays out of ``slot``."""
    return [
        lax.dynamic_index_in_dim(ring[entry], slot, 0, keepdims=False) for entry in stretch.entries
    ]
