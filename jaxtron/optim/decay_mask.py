"""Which parameters decay."""

from typing import Any

import jax

STACKING_AXES = ("layers",)
"""Logical axes along which one parameter of every layer is stacked; they do not make it a matrix.
"""


def decay_mask(logical_axes: Any) -> Any:
    """True for every parameter that weight decay applies to (Megatron's rule).

    Vectors (norm weights and the like; stacking axes not counted) and parameters whose name is
    ``bias`` or ends in ``_bias`` do not decay. Embeddings and routers do.

    Args:
        logical_axes: a tree like the parameters, whose leaves are tuples of logical axis names.

    Returns:
        A tree of bools of the same structure.
    """
    return jax.tree_util.tree_map_with_path(_decays, logical_axes, is_leaf=_is_axes)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)


def _decays(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> bool:
    name = str(getattr(path[-1], "key", path[-1])) if path else ""
    if name == "bias" or name.endswith("_bias"):
        return False
    return len([axis for axis in axes if axis not in STACKING_AXES]) > 1
