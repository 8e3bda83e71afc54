"""The update of moments that lie in host memory, a piece of them on the device at a time.

Parameters are updated one after the other, and large ones in pieces: stacked layers some layers at
a time, tables some rows at a time. A piece comes to the device when the one before it is back, so
the device holds ``PIECE_BYTES`` of a parameter's moments (or one layer of them), not all moments.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxtron.errors import ConfigError
from jaxtron.optim.matrices import is_axes

Leaves = list[Any]

PIECE_BYTES = 2**28
"""Bytes of a moment that come to a device at once, if its layers or rows can be cut so."""


@dataclass(frozen=True)
class _Part:
    """One parameter and what belongs to it.

    Attributes:
        param: its number among the parameters' leaves.
        state: numbers of the optimizer state's leaves that belong to it.
        parts: over how many devices its first dimension is split.
        pieces: how many it is updated in, each part cut along the first dimension.
        optimizer: the update rule of this parameter alone.
        structure: of its state, whose leaves are the shared ones and those of ``state``, in order.
    """

    param: int
    state: tuple[int, ...]
    parts: int
    pieces: int
    optimizer: optax.GradientTransformation
    structure: Any


class StreamedUpdate:
    """One optimizer step over moments in host memory; traceable.

    It gives what ``optimizer.update`` on whole trees gives, because every built-in optimizer treats
    parameters, and the layers of a stacked one, independently of each other.

    Args:
        build: logical axes of some parameters (``optax.MaskedNode()`` in place of the others) to
            their optimizer.
        logical_axes: of all parameters.
        shapes: of all parameters.
        state: shapes of the whole optimizer's state.
        device: shardings of that state in device memory.
        host: its shardings between the steps.
        rows_apart: whether the optimizer updates the rows of tables independently as well.

    Raises:
        ConfigError: an optimizer whose state is not made of trees like the parameters.
    """

    def __init__(
        self,
        build: Callable[[Any], optax.GradientTransformation],
        *,
        logical_axes: Any,
        shapes: Any,
        state: Any,
        device: Any,
        host: Any,
        rows_apart: bool,
    ) -> None:
        params, tree = jax.tree_util.tree_flatten_with_path(shapes)
        self._params_tree: Any = tree
        axes = jax.tree.leaves(logical_axes, is_leaf=is_axes)
        leaves, self._state_tree = jax.tree_util.tree_flatten_with_path(state)
        owners = [_owner(path, [own for own, _ in params]) for path, _ in leaves]
        self._shared = tuple(n for n, owner in enumerate(owners) if owner is None)
        self._device, self._host = jax.tree.leaves(device), jax.tree.leaves(host)
        self._parts = []
        for number, ((_, shape), names) in enumerate(zip(params, axes, strict=True)):
            optimizer = build(self._only(number, names))
            own = jax.eval_shape(optimizer.init, self._only(number, shape))
            numbers = [n for n, owner in enumerate(owners) if owner in (None, number)]
            if _shapes(jax.tree.leaves(own)) != _shapes([leaves[n][1] for n in numbers]):
                raise ConfigError(
                    "optimizer.offload is true, but the state of this optimizer.name cannot be cut "
                    "by parameter (it is not made of trees like the parameters'): set "
                    "optimizer.offload to false"
                )
            moments = tuple(n for n in numbers if owners[n] is not None)
            parts = pieces = 1
            if names[0] == "layers" or (rows_apart and names[0] == "vocab"):
                own_moments = [(leaves[n][1], self._device[n]) for n in moments]
                parts, pieces = _pieces(shape.shape[0], own_moments)
            structure = jax.tree.structure(own)
            self._parts.append(_Part(number, moments, parts, pieces, optimizer, structure))

    def _only(self, number: int, leaf: Any) -> Any:
        """A tree like the parameters that holds one leaf."""
        leaves: Leaves = [optax.MaskedNode()] * self._params_tree.num_leaves
        leaves[number] = leaf
        return jax.tree.unflatten(self._params_tree, leaves)

    def __call__(self, grads: Any, state: Any, params: Any, applies: jax.Array) -> tuple[Any, Any]:
        """New parameters and new state.

        Args:
            grads: gradients.
            state: the optimizer's state, its arrays in host memory.
            params: parameters.
            applies: bool scalar; where it is false everything keeps its value.
        """
        gradients, weights = jax.tree.leaves(grads), jax.tree.leaves(params)
        moments = jax.tree.leaves(state)
        before = [moments[n] for n in self._shared]
        after = before
        finished: tuple[int, ...] = ()
        for part in self._parts:
            own, back = [moments[n] for n in part.state], [moments[n] for n in finished]
            # No transfer before the gradients are there and the moments before are on the host.
            own, gradients, back = lax.optimization_barrier((own, gradients, back))
            for n, leaf in zip(finished, back, strict=True):
                moments[n] = leaf
            update = functools.partial(self._update, part, applies, before)
            weights[part.param], own, after = _piecewise(
                update, part, gradients[part.param], weights[part.param], own, before
            )
            for n, leaf in zip(part.state, own, strict=True):
                moments[n] = leaf
            finished = part.state
        for n, leaf in zip(self._shared, after, strict=True):
            moments[n] = leaf
        return (
            jax.tree.unflatten(self._params_tree, weights),
            jax.tree.unflatten(self._state_tree, moments),
        )

    def _update(
        self,
        part: _Part,
        applies: jax.Array,
        shared: Leaves,
        grad: jax.Array,
        param: jax.Array,
        own: Leaves,
    ) -> tuple[jax.Array, Leaves, Leaves]:
        """New parameter, moments and shared state from a piece's moments on the host."""
        own = [jax.device_put(s, self._device[n]) for n, s in zip(part.state, own, strict=True)]
        before = dict(zip((*self._shared, *part.state), (*shared, *own), strict=True))
        numbers = sorted(before)
        updates, state = part.optimizer.update(
            self._only(part.param, grad),
            jax.tree.unflatten(part.structure, [before[n] for n in numbers]),
            self._only(part.param, param),
        )
        [change] = jax.tree.leaves(updates)
        after = {
            n: jnp.where(applies, leaf, before[n])
            for n, leaf in zip(numbers, jax.tree.leaves(state), strict=True)
        }
        return (
            jnp.where(applies, param + change, param),
            [jax.device_put(after[n], self._host[n]) for n in part.state],
            [after[n] for n in self._shared],
        )


def _piecewise(
    update: Callable[..., tuple[jax.Array, Leaves, Leaves]],
    part: _Part,
    grad: jax.Array,
    param: jax.Array,
    own: Leaves,
    shared: Leaves,
) -> tuple[jax.Array, Leaves, Leaves]:
    """Update a parameter and its moments piece by piece, in place.

    Where the first dimension is split over devices, each has its rows in a piece.
    """
    if part.pieces == 1:
        return update(grad, param, own)

    def apart(leaf: jax.Array) -> jax.Array:
        return leaf if part.parts == 1 else leaf.reshape(part.parts, -1, *leaf.shape[1:])

    def together(leaf: jax.Array) -> jax.Array:
        return leaf if part.parts == 1 else leaf.reshape(-1, *leaf.shape[2:])

    axis = 0 if part.parts == 1 else 1

    def piece(i: jax.Array, arrays: tuple[jax.Array, Leaves, Leaves]) -> Any:
        param, own, _ = arrays

        def cut(leaf: jax.Array) -> jax.Array:
            rows = leaf.shape[0] // (part.parts * part.pieces)
            return together(lax.dynamic_slice_in_dim(apart(leaf), i * rows, rows, axis))

        def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
            rows = new.shape[0] // part.parts
            return together(
                lax.dynamic_update_slice_in_dim(apart(leaf), apart(new), i * rows, axis)
            )

        new, moments, changed = update(cut(grad), cut(param), [cut(leaf) for leaf in own])
        return put(param, new), [put(*pair) for pair in zip(own, moments, strict=True)], changed

    return lax.fori_loop(0, part.pieces, piece, (param, own, shared))


def _pieces(rows: int, moments: Sequence[tuple[Any, Any]]) -> tuple[int, int]:
    """Over how many devices the first dimension is split, and in how many pieces each part goes.

    The fewest pieces that divide a part and have ``PIECE_BYTES`` at most; else all rows.

    Args:
        rows: layers of a stack, or rows of a table.
        moments: shape and sharding of each.
    """
    largest, parts = 0, 1
    for leaf, sharding in moments:
        own = sharding.shard_shape(leaf.shape)
        parts = max(parts, leaf.shape[0] // own[0])
        largest = max(largest, math.prod(own) * leaf.dtype.itemsize)
    rows //= parts
    fits = (n for n in range(1, rows) if rows % n == 0 and largest <= n * PIECE_BYTES)
    return parts, next(fits, rows)


def _owner(path: Any, params: Sequence[Any]) -> int | None:
    """Number of the parameter whose path lies within the path of a leaf of the state.

    The longest counts, for one parameter's path may end as another's.
    """
    found, length = None, 0
    for number, own in enumerate(params):
        if len(own) > length and any(
            path[start : start + len(own)] == own for start in range(len(path) - len(own) + 1)
        ):
            found, length = number, len(own)
    return found


def _shapes(leaves: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(leaf.shape, leaf.dtype) for leaf in leaves]
