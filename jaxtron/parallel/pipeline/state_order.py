"""A run's state between the model's order of layers, which checkpoints have, and its stages'."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtron.parallel.pipeline.stack_order import StackOrder, is_stacked

State = dict[str, Any]


@dataclass(frozen=True)
class StateOrder:
    """Conversion of a sharded state.

    Attributes:
        order: of the stacked layers.
        mesh: its devices.
        shardings: of the state in placed order.
    """

    order: StackOrder
    mesh: Mesh
    shardings: Mapping[str, Any]

    def logical_shardings(self, placed: Any) -> Any:
        """Shardings of a part of the state in logical order.

        Layers that do not divide evenly over the stages are split along another dimension.
        """
        shardings = {name: self.shardings[name] for name in placed}
        if self.order.num_layers % self.mesh.shape["pipeline"] == 0:
            return shardings
        return self._whole_stacks(placed)

    def _whole_stacks(self, placed: Any) -> Any:
        """Shardings of a part of the state that leave stacks whole, split along another dimension.

        Layers change their order in such arrays: each device does its part by itself. (Of a split
        stack XLA's partitioner would gather all; JAX 0.11's fails on it.)
        """
        stages = self.mesh.shape["pipeline"]

        def whole(path: Any, leaf: Any, sharding: NamedSharding) -> NamedSharding:
            if not is_stacked(path, leaf, len(self.order.layers)):
                return sharding
            shape = sharding.shard_shape(leaf.shape)
            entries = [*sharding.spec, *(None,) * (leaf.ndim - len(sharding.spec))]
            entries[0] = None
            for dim in range(1, leaf.ndim):
                if shape[dim] % stages == 0:
                    entry = entries[dim] or ()
                    own = (entry,) if isinstance(entry, str) else tuple(entry)
                    entries[dim] = (*own, "pipeline")
                    break
            return NamedSharding(self.mesh, PartitionSpec(*entries))

        shardings = {name: self.shardings[name] for name in placed}
        return jax.tree_util.tree_map_with_path(whole, placed, shardings)

    def to_logical(self, state: State) -> State:
        """The state, or some of its entries, with the layers in the model's order.

        The same arrays when the order is the same (no pipeline, or one chunk a stage and an even
        placement), else new ones.
        """
        if self.order.identity:
            return state
        whole = self._whole_stacks(state)

        def convert(state: State) -> State:
            state = jax.tree.map(lax.with_sharding_constraint, state, whole)
            return jax.tree.map(lax.with_sharding_constraint, self.order.logical(state), whole)

        return jax.jit(convert, out_shardings=self.logical_shardings(state))(state)

    def from_logical(self, state: State) -> State:
        """The inverse of :meth:`to_logical`; ``state`` may not be used afterwards."""
        if self.order.identity:
            return state
        shardings = {name: self.shardings[name] for name in state}
        return jax.jit(self.place, out_shardings=shardings)(state)

    def place(self, state: State) -> State:
        """A part of the state from logical to placed order; traceable."""
        if self.order.identity:
            return state
        whole = self._whole_stacks(jax.eval_shape(self.order.place, state))
        state = jax.tree.map(lax.with_sharding_constraint, state, whole)
        return jax.tree.map(lax.with_sharding_constraint, self.order.place(state), whole)
