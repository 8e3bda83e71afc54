"""Shardings of the optimizer state, derived from the parameters'."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtron.errors import ConfigError

HOST = "pinned_host"


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """``jax.ShapeDtypeStruct`` of every leaf of ``shapes`` with its sharding."""
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        shardings,
    )


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


def moments_on_host(abstract_state: Any, shardings: Any) -> Any:
    """The shardings of an optimizer's state with its arrays, not its counts, in pinned host memory.

    Raises:
        ConfigError: the devices have no such memory.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    for device in mesh.local_mesh.devices.flat:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise ConfigError(
                f"optimizer.offload keeps moments in the memory {HOST}, which {device} does not "
                f"offer (it has {', '.join(kinds)}): set optimizer.offload to false"
            )
    return jax.tree.map(
        lambda leaf, sharding: sharding.with_memory_kind(HOST) if leaf.ndim else sharding,
        abstract_state,
        shardings,
    )
