"""Which tokens of a sequence a device routes.

Where an expert's inner width is split over ``tensor``, every member needs all tokens: the block is
entered and left like a tensor-parallel MLP, and all members route alike. Otherwise the members
share the sequence, with or without sequence parallelism, and each routes its own part.
"""

from dataclasses import dataclass

import jax
from jax import lax

from jaxtron.mesh.axes import BATCH_AXES
from jaxtron.parallel.region import Region


@dataclass(frozen=True)
class Tokens:
    """How the members of ``tensor`` share the tokens of an MoE layer.

    Attributes:
        region: the manual region.
        whole: every member has all tokens (and a part of every expert).
    """

    region: Region
    whole: bool

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Mesh axes that split a sequence."""
        return ("context",) if self.whole else ("context", "tensor")

    @property
    def microbatch_axes(self) -> tuple[str, ...]:
        """Mesh axes that split a microbatch."""
        return (*BATCH_AXES, *self.row_axes)

    @property
    def copies(self) -> int:
        """Devices that route the same tokens."""
        return self.region.tensor if self.whole else 1

    def enter(self, x: jax.Array) -> jax.Array:
        """From the residual stream ``[b, s/tensor, h]`` to this device's tokens ``[b, t, h]``."""
        if self.whole:
            return self.region.gather_sequence(x)
        return x if self.region.sequence_parallel else self.own(x)

    def own(self, a: jax.Array) -> jax.Array:
        """This device's part of ``[b, s, ...]``, whose sequence is that of its context shard."""
        if self.whole or self.region.tensor == 1:
            return a
        part = a.shape[1] // self.region.tensor
        return lax.dynamic_slice_in_dim(a, lax.axis_index("tensor") * part, part, 1)

    def leave(self, y: jax.Array) -> jax.Array:
        """Back to the residual stream; sums what members computed of each expert."""
        if self.whole:
            return self.region.reduce_sequence(y)
        if self.region.sequence_parallel or self.region.tensor == 1:
            return y
        return lax.all_gather(y, "tensor", axis=1, tiled=True)
