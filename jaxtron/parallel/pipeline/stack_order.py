"""The order in which a run keeps the layers of stacked arrays.

A checkpoint, like the model, has the layers in their logical order, ``[num_layers, ...]``. A
pipeline keeps them as ``[stage, slot, ...]``, so that each stage's chunks are its own shard; stages
with fewer layers than others have empty slots, which hold zeros. With one chunk a stage and an even
placement the two orders are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtron.parallel.pipeline.layout import Placement


@dataclass(frozen=True)
class StackOrder:
    """Conversion between logical and placed order.

    Attributes:
        layers: the layer in each place, -1 for an empty slot.
    """

    layers: tuple[int, ...]

    @property
    def identity(self) -> bool:
        """Whether both orders are the same."""
        return self.layers == tuple(range(len(self.layers)))

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(layer >= 0 for layer in self.layers)

    def place(self, tree: Any) -> Any:
        """Stacked leaves of ``tree`` from logical to placed order; traceable.

        Leaves are arrays or ``jax.ShapeDtypeStruct``; a stacked one has ``layers`` in its path.
        """
        order = np.array(self.layers)

        def place(a: Any) -> Any:
            if isinstance(a, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct((len(order), *a.shape[1:]), a.dtype)
            filled = (order >= 0).reshape(-1, *(1,) * (a.ndim - 1))
            return jnp.where(filled, jnp.take(a, np.maximum(order, 0), axis=0), 0).astype(a.dtype)

        return self._map(place, tree, self.num_layers)

    def logical(self, tree: Any) -> Any:
        """The inverse of :meth:`place`."""
        places = np.array([self.layers.index(layer) for layer in range(self.num_layers)])

        def logical(a: Any) -> Any:
            if isinstance(a, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct((len(places), *a.shape[1:]), a.dtype)
            return jnp.take(a, places, axis=0)

        return self._map(logical, tree, len(self.layers))

    def _map(self, function: Any, tree: Any, length: int) -> Any:
        if self.identity:
            return tree
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: function(leaf) if is_stacked(path, leaf, length) else leaf, tree
        )


def is_stacked(path: Sequence[Any], leaf: Any, length: int) -> bool:
    """Whether a leaf of a state has one entry a layer in its first dimension."""
    named = any(getattr(entry, "key", None) == "layers" for entry in path)
    return named and leaf.ndim > 0 and leaf.shape[0] == length


def stack_order(placement: Placement) -> StackOrder:
    """Order of the layers on the stages of ``placement``."""
    layers: list[int] = []
    for chunks in placement.layers:
        own = [layer for chunk in chunks for layer in chunk]
        layers += own + [-1] * (placement.slots - len(own))
    return StackOrder(tuple(layers))
