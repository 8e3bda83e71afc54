"""The matrices within a parameter.

A parameter is stored with a dimension per meaning: the layers are stacked, query and key have heads
and channels, key and value or gate and up lie side by side. Methods that treat a weight as a linear
map from an input to an output space (Muon, Adafactor) work on the matrices that this module cuts
out of it by the names of its dimensions:

====================================================  =======================================
``layers, embed, heads, head_dim`` (query)            per layer ``[embed, heads * head_dim]``
``layers, embed, None, kv_heads, head_dim``           the same for key and for value
``layers, heads, head_dim, embed`` (output)           per layer ``[heads * head_dim, embed]``
``layers, embed, None, mlp`` (gate and up)            per layer and part ``[embed, mlp]``
``layers, mlp, embed`` (down)                         per layer ``[mlp, embed]``
``layers, experts, embed, None, expert_mlp``          per expert, layer and part the same
``layers, experts, expert_mlp, embed``                per expert and layer ``[expert_mlp, embed]``
``layers, router, embed``                             per layer ``[embed, router]``
``None, embed, embed`` (further tokens' projection)   per part ``[embed, embed]``
``vocab, embed``                                      ``[vocab, embed]``
====================================================  =======================================
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import optax

Axes = tuple[str | None, ...]

STACKING_AXES = ("layers", None)
"""Dimensions along which separate parameters lie side by side."""

HEAD_AXES = ("heads", "kv_heads")
"""Names whose dimension forms one space with the ``head_dim`` after it."""


def is_axes(node: Any) -> bool:
    """Whether a node of a tree of logical axes is a leaf (a masked one is not)."""
    return isinstance(node, tuple) and not isinstance(node, optax.MaskedNode)


@dataclass(frozen=True)
class Matrices:
    """Which dimensions of a parameter form the stack, the input and the output of its matrices.

    A parameter of vectors has no input dimensions.
    """

    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a linear map."""
        return bool(self.inputs)

    def split(self, x: jax.Array) -> jax.Array:
        """The matrices ``[stack, input, output]`` of ``x``, or the vectors ``[stack, output]``."""
        order = (*self.stack, *self.inputs, *self.outputs)
        groups = (self.stack, self.inputs, self.outputs)
        shape = [math.prod(x.shape[dim] for dim in group) for group in groups]
        if not self.inputs:
            del shape[1]
        return x.transpose(order).reshape(shape)

    def join(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Inverse of :meth:`split` for a parameter of that shape."""
        order = (*self.stack, *self.inputs, *self.outputs)
        back = sorted(range(len(order)), key=order.__getitem__)
        return matrices.reshape([shape[dim] for dim in order]).transpose(back)


def matrices_of(axes: Axes) -> Matrices:
    """The matrices of a parameter with these logical axes.

    The named dimensions, heads taken together with their channels, are the spaces of the parameter.
    Two of them are input and output, in the order in which they are stored; ``router`` is always
    the output. A third, ``experts``, counts the matrices: it comes first in the stack, so that what
    a device holds of it stays there. Fewer or more than two make no matrix: the parameter is taken
    as vectors.
    """
    spaces: list[list[int]] = []
    stack = []
    for dim, name in enumerate(axes):
        if name in STACKING_AXES:
            stack.append(dim)
        elif name == "head_dim" and dim > 0 and axes[dim - 1] in HEAD_AXES:
            spaces[-1].append(dim)
        else:
            spaces.append([dim])
    experts = [space for space in spaces if axes[space[0]] == "experts"]
    if len(spaces) > 2 and experts:
        spaces.remove(experts[0])
        stack = experts[0] + stack
    if len(spaces) != 2:
        outputs = tuple(dim for space in spaces for dim in space)
        return Matrices(tuple(stack), (), outputs)
    if axes[spaces[0][0]] == "router":
        spaces.reverse()
    return Matrices(tuple(stack), tuple(spaces[0]), tuple(spaces[1]))
