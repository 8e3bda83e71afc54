"""Which parameters decay."""

import functools
from typing import Any

import jax

from jaxtron.optim.matrices import is_axes

STACKING_AXES = ("layers",)
"""Logical axes along which one parameter of every layer is stacked; they do not make it a matrix.
"""

QK_NORMS = ("query_norm", "key_norm")
"""Modules that ``apply_wd_to_qk_layernorm`` is about."""


def decay_mask(logical_axes: Any, *, qk_layernorm: bool = False) -> Any:
    """True for every parameter that weight decay applies to (Megatron's rule).

    Vectors (norm weights and the like; stacking axes not counted) and parameters whose name is
    ``bias`` or ends in ``_bias`` do not decay. Embeddings and routers do.

    Args:
        logical_axes: a tree like the parameters, whose leaves are tuples of logical axis names.
        qk_layernorm: the weights of the norms of query and key decay as well.

    Returns:
        A tree of bools of the same structure.
    """
    decays = functools.partial(_decays, qk_layernorm)
    return jax.tree_util.tree_map_with_path(decays, logical_axes, is_leaf=is_axes)


def _decays(qk_layernorm: bool, path: tuple[Any, ...], axes: tuple[str | None, ...]) -> bool:
    names = [str(getattr(entry, "key", entry)) for entry in path]
    name = names[-1] if names else ""
    if name == "bias" or name.endswith("_bias"):
        return False
    if qk_layernorm and set(names) & set(QK_NORMS):
        return True
    return len([axis for axis in axes if axis not in STACKING_AXES]) > 1
