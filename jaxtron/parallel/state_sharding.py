"""Shardings of the optimizer state, derived from the parameters'."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def optimizer_state_shardings(abstract_state: Any, shapes: Any, shardings: Any) -> Any:
    """Sharding of every leaf of an optimizer's state.

    Moments carry their parameter's path at the end of their own and have its shape: they are
    sharded like it. Everything else (counts, factored statistics) is replicated.

    Args:
        abstract_state: ``jax.eval_shape`` of the optimizer's ``init``.
        shapes: the parameters' shapes.
        shardings: the parameters' shardings, a ``NamedSharding`` per leaf.
    """
    flat_shapes = jax.tree_util.tree_leaves_with_path(shapes)
    flat_shardings = jax.tree.leaves(shardings)
    by_path = {
        tuple(path): (shape.shape, sharding)
        for (path, shape), sharding in zip(flat_shapes, flat_shardings, strict=True)
    }
    replicated = NamedSharding(flat_shardings[0].mesh, PartitionSpec())

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            match = by_path.get(tuple(path[start:]))
            if match is not None and match[0] == leaf.shape:
                return match[1]
        return replicated

    return jax.tree_util.tree_map_with_path(sharding, abstract_state)
