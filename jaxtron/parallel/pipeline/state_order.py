"""A run's state between the model's order of layers, which checkpoints have, and its stages'."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtron.parallel.pipeline.stack_order import StackOrder, is_stacked
from jaxtron.parallel.state_sharding import HOST

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
        return jax.tree.map(
            lambda whole, sharding: whole.with_memory_kind(sharding.memory_kind),
            self._whole_stacks(placed),
            shardings,
        )

    def _whole_stacks(self, placed: Any) -> Any:
        """Shardings, in device memory, of a part of the state that leave stacks whole.

        Layers change their order in such arrays, split along another dimension: each device does
        its part by itself. (Of a split stack XLA's partitioner would gather all; JAX 0.11's fails
        on it.)
        """

        def whole(path: Any, leaf: Any, sharding: NamedSharding) -> NamedSharding:
            if not is_stacked(path, leaf, len(self.order.layers)):
                return NamedSharding(self.mesh, sharding.spec)
            return self._whole(leaf, sharding)

        shardings = {name: self.shardings[name] for name in placed}
        return jax.tree_util.tree_map_with_path(whole, placed, shardings)

    def _whole(self, leaf: Any, sharding: NamedSharding) -> NamedSharding:
        """The same of a stacked array in placed order."""
        stages = self.mesh.shape["pipeline"]
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

    def to_logical(self, state: State) -> State:
        """The state, or some of its entries, with the layers in the model's order.

        The same arrays when the order is the same (no pipeline, or one chunk a stage and an even
        placement), else new ones.
        """

        def convert(state: State) -> State:
            whole = self._whole_stacks(state)
            state = jax.tree.map(lax.with_sharding_constraint, state, whole)
            return jax.tree.map(lax.with_sharding_constraint, self.order.logical(state), whole)

        targets = self.logical_shardings(state)
        return self._converted(state, targets, len(self.order.layers), convert, self.order.logical)

    def from_logical(self, state: State) -> State:
        """The inverse of :meth:`to_logical`; ``state`` may not be used afterwards."""
        targets = {name: self.shardings[name] for name in state}
        return self._converted(state, targets, self.order.num_layers, self.place, self.order.place)

    def _converted(
        self,
        state: State,
        targets: State,
        length: int,
        convert: Callable[[State], State],
        reorder: Callable[[Any], Any],
    ) -> State:
        """A state in the other order.

        Entries in host memory (offloaded moments) come to the devices a stack at a time, each
        awaited (``checkpoint/digest.py`` says why).

        Args:
            state: arrays.
            targets: shardings of the result.
            length: of stacks.
            convert: of what is on the devices; traceable.
            reorder: of trees with stacks; traceable.
        """
        if self.order.identity:
            return state

        def one(path: Any, leaf: Any, sharding: NamedSharding, target: NamedSharding) -> Any:
            if not is_stacked(path, leaf, length):
                return leaf
            placed = jax.ShapeDtypeStruct((len(self.order.layers), *leaf.shape[1:]), leaf.dtype)
            whole = self._whole(placed, sharding)

            def stack(a: Any) -> Any:
                a = reorder({"layers": lax.with_sharding_constraint(a, whole)})["layers"]
                return lax.with_sharding_constraint(a, whole)

            # transfers apart: XLA's partitioner fails on them beside a change of sharding
            near = jax.device_put(leaf, NamedSharding(self.mesh, leaf.sharding.spec))
            after = jax.jit(stack, out_shardings=NamedSharding(self.mesh, target.spec))(near)
            return jax.device_put(after, target).block_until_ready()

        away = {name for name in state if _on_host(self.shardings[name])}
        near = {name: part for name, part in state.items() if name not in away}
        shardings = {name: targets[name] for name in near}
        done = jax.jit(convert, out_shardings=shardings)(near) if near else {}
        for name in away:
            done[name] = jax.tree_util.tree_map_with_path(
                one, state[name], self.shardings[name], targets[name]
            )
        return {name: done[name] for name in state}

    def place(self, state: State) -> State:
        """A part of the state from logical to placed order; traceable."""
        if self.order.identity:
            return state
        whole = self._whole_stacks(jax.eval_shape(self.order.place, state))
        state = jax.tree.map(lax.with_sharding_constraint, state, whole)
        return jax.tree.map(lax.with_sharding_constraint, self.order.place(state), whole)


def _on_host(shardings: Any) -> bool:
    return any(sharding.memory_kind == HOST for sharding in jax.tree.leaves(shardings))
