"""How each parameter lies on the mesh: stored shards, and the copy that layers compute with."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtron.mesh.axes import AXES
from jaxtron.mesh.rules import LogicalRules
from jaxtron.parallel.config import DataSharding


@dataclass(frozen=True)
class ParamLayout:
    """Placement of one parameter.

    Attributes:
        name: path of the leaf, ``layers/attention/query``.
        logical: names of the dimensions; the first is ``layers`` for a stacked leaf.
        shape: global shape, the same on every mesh.
        model_axes: per dimension, the mesh axes that split it in the copy layers compute with.
        zero_axes: mesh axes that split the stored parameter further (ZeRO).
        zero_dim: the dimension they split.
        compute_dtype: dtype of the copy.
        stack_axes: of one layer's slice, the mesh axes that split the stack it was taken from.
    """

    name: str
    logical: tuple[str | None, ...]
    shape: tuple[int, ...]
    model_axes: tuple[tuple[str, ...], ...]
    zero_axes: tuple[str, ...]
    zero_dim: int
    compute_dtype: Any
    stack_axes: tuple[str, ...] = ()

    @property
    def stacked(self) -> bool:
        """Whether the leaf holds all layers, in its first dimension."""
        return bool(self.logical) and self.logical[0] == "layers"

    @property
    def stored_spec(self) -> PartitionSpec:
        """Sharding of master weight, optimizer state and reduced gradient."""
        entries = list(self.model_axes)
        if self.zero_axes:
            entries[self.zero_dim] = entries[self.zero_dim] + self.zero_axes
        return PartitionSpec(*(e or None for e in entries))

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the stored parameter is replicated."""
        used = {a for axes in self.model_axes for a in axes}
        used |= {*self.zero_axes, *self.stack_axes}
        return tuple(a for a in AXES if a not in used)

    def copy_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the copy that a device computes with, on a mesh of ``sizes``."""
        return tuple(
            size // math.prod(sizes[axis] for axis in axes)
            for size, axes in zip(self.shape, self.model_axes, strict=True)
        )

    def as_matrix(self, copy: jax.Array) -> jax.Array:
        """The copy, or its gradient, as the matrix ``[in, out]`` that it is in a product.

        XLA adds a product to an array within the GEMM only where no reshape is between them. What
        is stacked, or no single matrix, stays as it is.
        """
        if copy.ndim < 3 or self.stacked or "experts" in self.logical:
            return copy
        if self.logical[-1] == "embed":
            return copy.reshape(-1, copy.shape[-1])
        return copy.reshape(copy.shape[0], -1)

    def unstacked(self) -> "ParamLayout":
        """Layout of one layer's slice of a stacked leaf."""
        return replace(
            self,
            logical=self.logical[1:],
            shape=self.shape[1:],
            model_axes=self.model_axes[1:],
            zero_dim=self.zero_dim - 1,
            stack_axes=self.model_axes[0],
        )


def is_vector(name: str, logical: Sequence[str | None]) -> bool:
    """Whether a parameter is a bias or has one dimension, apart from the stacked layers."""
    return name.endswith("bias") or sum(n != "layers" for n in logical) < 2


def _zero_dim(
    logical: Sequence[str | None],
    shape: Sequence[int],
    model_axes: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    parts: int,
) -> int | None:
    """First dimension whose local size divides in ``parts``: gathering it needs no transpose."""
    for dim, (name, size, axes) in enumerate(zip(logical, shape, model_axes, strict=True)):
        local = size // int(np.prod([sizes[a] for a in axes], initial=1))
        if name != "layers" and local % parts == 0:
            return dim
    return None


def _zero_split(
    logical: Sequence[str | None],
    shape: Sequence[int],
    model_axes: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    free: tuple[str, ...],
) -> tuple[tuple[str, ...], int]:
    """The axes of ``free`` that split a parameter further, and the dimension they split.

    All of them where a dimension divides by their product; otherwise those that give the most
    parts, of equal ones the faster. None of them: ``((), 0)``.
    """
    subsets = [s for n in range(len(free), 0, -1) for s in itertools.combinations(free, n)]
    ranked = sorted(
        subsets,
        key=lambda s: (s != free, -math.prod(sizes[a] for a in s), [-AXES.index(a) for a in s]),
    )
    for subset in ranked:
        parts = math.prod(sizes[a] for a in subset)
        dim = _zero_dim(logical, shape, model_axes, sizes, parts)
        if dim is not None and (parts > 1 or subset == free):
            return subset, dim
    return (), 0


def param_layouts(
    shapes: Any,
    logical: Any,
    rules: LogicalRules,
    data_sharding: DataSharding,
    compute_dtype: Any,
) -> Any:
    """Layout of every parameter.

    A router's weights are copied in fp32 whatever the compute dtype: small differences decide.

    Vectors (norm weights, biases) stay whole on every data shard and in fp32: sharding them would
    add a collective per vector and save nothing. A matrix none of whose dimensions divides by all
    ``zero`` axes is split over some of them, or stays whole too; ``python -m jaxtron.mesh`` shows
    which.

    Args:
        shapes: pytree (nested dicts) of ``jax.ShapeDtypeStruct``.
        logical: the same tree with a tuple of dimension names per leaf.
        rules: the logical-axis table.
        data_sharding: ``parallel.data_sharding``.
        compute_dtype: dtype in which matrices enter matrix products.

    Returns:
        The same tree with a :class:`ParamLayout` per leaf.
    """
    zero_axes = rules.axes("zero") if data_sharding != "no_shard" else ()

    def layout(
        path: Any, shape: jax.ShapeDtypeStruct, names: tuple[str | None, ...]
    ) -> ParamLayout:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = rules.spec(names, shape.shape, name)
        axes = tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in spec)
        matrix = not is_vector(name, names)
        free = tuple(a for a in zero_axes if all(a not in e for e in axes)) if matrix else ()
        split, dim = _zero_split(names, shape.shape, axes, rules.sizes, free)
        return ParamLayout(
            name=name,
            logical=tuple(names),
            shape=tuple(shape.shape),
            model_axes=axes,
            zero_axes=split,
            zero_dim=dim,
            compute_dtype=compute_dtype if matrix and "router" not in names else jnp.float32,
        )

    return jax.tree_util.tree_map_with_path(
        layout, shapes, logical, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )


def is_layout(leaf: Any) -> bool:
    """Whether ``leaf`` is a :class:`ParamLayout` (for ``is_leaf`` of tree functions)."""
    return isinstance(leaf, ParamLayout)
