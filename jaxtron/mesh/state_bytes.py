"""Bytes of training state on a device, counted from the shapes of its arrays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jaxtron.mesh.axes import AXES
from jaxtron.mesh.grid import parts
from jaxtron.parallel.config import DataSharding
from jaxtron.parallel.param_layout import ParamLayout, is_layout
from jaxtron.parallel.state_sharding import optimizer_state_shardings

FP32_BYTES = 4


@dataclass(frozen=True)
class StateBytes:
    """Bytes on the fullest device at one level of ``parallel.data_sharding``.

    Attributes:
        level: the level.
        copies: weights as layers read them (gathered, in the compute dtype), where they are not the
            stored ones; at ``optim_grads_params`` two layers at a time, or the embedding or output
            weight where that is larger.
        gradients: accumulators over microbatches, in ``precision.grads``.
        params: fp32 master weights as stored.
        optimizer: the optimizer's state.
    """

    level: DataSharding
    copies: int
    gradients: int
    params: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of the state; activations and temporary buffers are not in it."""
        return self.copies + self.gradients + self.params + self.optimizer


def stored_shape(layout: ParamLayout, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a device's piece of the stored parameter."""
    shape = list(copy_shape(layout, sizes))
    if layout.zero_axes:
        shape[layout.zero_dim] //= parts(sizes, layout.zero_axes)
    return tuple(shape)


def copy_shape(layout: ParamLayout, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the copy that a device's layers read."""
    return tuple(
        dim // parts(sizes, axes) for dim, axes in zip(layout.shape, layout.model_axes, strict=True)
    )


def state_bytes(
    level: DataSharding,
    layouts: Any,
    abstract_optimizer: Any,
    sizes: Mapping[str, int],
    grads_dtype: Any = jnp.float32,
) -> StateBytes:
    """Count the state of one device.

    Args:
        level: ``parallel.data_sharding``.
        layouts: a :class:`ParamLayout` per parameter at that level, parts at the top.
        abstract_optimizer: ``jax.eval_shape`` of the optimizer's ``init``.
        sizes: sizes of the mesh axes.
        grads_dtype: format in which gradients are summed over microbatches.
    """
    flat: Sequence[ParamLayout] = jax.tree.leaves(layouts, is_leaf=is_layout)
    stored = sum(math.prod(stored_shape(layout, sizes)) for layout in flat)
    whole = sum(math.prod(copy_shape(layout, sizes)) for layout in flat)
    scattered = level in ("optim_grads", "optim_grads_params")
    by_part = {
        name: [_copy_bytes(layout, sizes) for layout in jax.tree.leaves(part, is_leaf=is_layout)]
        for name, part in layouts.items()
    }
    if level == "optim_grads_params":
        layers = by_part.pop("layers")
        held = [
            copied // copy_shape(layout, sizes)[0]
            for copied, layout in zip(
                layers, jax.tree.leaves(layouts["layers"], is_leaf=is_layout), strict=True
            )
        ]
        copies = max(2 * sum(held), *(sum(part) for part in by_part.values()))
    else:
        copies = sum(sum(part) for part in by_part.values())
    return StateBytes(
        level=level,
        copies=copies,
        gradients=jnp.dtype(grads_dtype).itemsize * (stored if scattered else whole),
        params=FP32_BYTES * stored,
        optimizer=_optimizer_bytes(layouts, abstract_optimizer, sizes),
    )


def _copy_bytes(layout: ParamLayout, sizes: Mapping[str, int]) -> int:
    """Bytes of the copy that layers read; 0 where that is the stored array itself."""
    dtype = jnp.dtype(layout.compute_dtype)
    if not layout.zero_axes and dtype == jnp.float32:
        return 0
    return dtype.itemsize * math.prod(copy_shape(layout, sizes))


def _optimizer_bytes(layouts: Any, abstract_optimizer: Any, sizes: Mapping[str, int]) -> int:
    mesh = AbstractMesh(
        tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )
    shapes = jax.tree.map(
        lambda layout: jax.ShapeDtypeStruct(layout.shape, jnp.float32), layouts, is_leaf=is_layout
    )
    shardings = jax.tree.map(
        lambda layout: NamedSharding(mesh, layout.stored_spec), layouts, is_leaf=is_layout
    )
    placed = optimizer_state_shardings(abstract_optimizer, shapes, shardings)
    return sum(
        leaf.dtype.itemsize * math.prod(sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(
            jax.tree.leaves(abstract_optimizer), jax.tree.leaves(placed), strict=True
        )
    )
