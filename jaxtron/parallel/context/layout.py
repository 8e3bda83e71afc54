"""Which tokens of a sequence each member of the ``context`` axis holds.

With causal masks a late token costs more than an early one. So a sequence is cut in ``2 R`` chunks,
and member ``g`` of a ring of ``R`` holds chunk ``g`` and chunk ``2 R - 1 - g``: every member then
has the same number of visible (query, key) pairs (zig-zag; Llama 3, arXiv:2407.21783, section
3.3.2). Where heads are exchanged instead of keys (DeepSpeed-Ulysses, arXiv:2309.14509), ``A``
members together are one member of the ring, and each holds a part of both chunks. Member ``i`` of
the axis is number ``i % A`` of ring member ``i // A``, so that those who exchange heads are
neighbours on the mesh.

With dynamic context parallelism the axis may be cut in groups of neighbours, each with a sequence
of its own (``dynamic.py``). What the axis then holds as one row are the rows of its groups, side by
side.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtron.parallel.config import ParallelConfig

AXIS = "context"


@dataclass(frozen=True)
class ContextLayout:
    """The cut of a sequence over ``ring * all_to_all`` members.

    Attributes:
        ring: R, members between which keys and values travel.
        all_to_all: A, members that exchange heads.
        groups: sequences side by side on the context axis.
    """

    ring: int
    all_to_all: int
    groups: int = 1

    @property
    def size(self) -> int:
        """Members that share a sequence; ``groups`` times as many are on the context axis."""
        return self.ring * self.all_to_all

    def member(self) -> jax.Array:
        """This device's number among those that share its sequence."""
        return lax.axis_index(AXIS) % self.size

    def group(self) -> jax.Array:
        """Number of this device's sequence on the axis."""
        return lax.axis_index(AXIS) // self.size

    @property
    def chunks(self) -> int:
        """Chunks of a row between which attention is computed blockwise; 1 without a ring."""
        return 2 * self.ring if self.ring > 1 else 1

    def order(self, length: int) -> np.ndarray:
        """Positions ``[length]`` in the order in which they lie on the axis, member after member.

        With one member this is the natural order.
        """
        chunk, part = length // (2 * self.ring), length // (2 * self.size)
        starts = [
            c * chunk + m * part
            for g in range(self.ring)
            for m in range(self.all_to_all)
            for c in (g, 2 * self.ring - 1 - g)
        ]
        return (np.array(starts)[:, None] + np.arange(part)).reshape(-1)

    def spans(self, length: int, member: int) -> list[range]:
        """Runs of consecutive positions that ``member`` holds: one or two."""
        own = self.order(length).reshape(self.size, -1)[member]
        cuts = np.flatnonzero(np.diff(own) != 1) + 1
        return [range(int(run[0]), int(run[-1]) + 1) for run in np.split(own, cuts)]

    def positions(self, length: int, member: jax.Array | int) -> jax.Array:
        """Positions int32 ``[length / size]`` of the tokens that ``member`` holds, ascending."""
        chunk, part = length // (2 * self.ring), length // (2 * self.size)
        group = member // self.all_to_all
        chunks = jnp.stack([jnp.asarray(group), jnp.asarray(2 * self.ring - 1 - group)])
        starts = chunks * chunk + member % self.all_to_all * part
        return (starts[:, None] + jnp.arange(part)).reshape(-1).astype(jnp.int32)

    def head_groups(self) -> list[list[int]]:
        """Places on the axis whose members exchange heads with each other."""
        a = self.all_to_all
        return [list(range(g * a, (g + 1) * a)) for g in range(self.groups * self.ring)]

    def sequences(self) -> list[list[int]] | None:
        """Places on the axis that share a sequence; None: all of it."""
        if self.groups == 1:
            return None
        return [list(range(g * self.size, (g + 1) * self.size)) for g in range(self.groups)]

    def next_in_ring(self) -> list[tuple[int, int]]:
        """(from, to) of every place on the axis when each sends to the next one of its ring."""
        return [
            (g * self.size + i, g * self.size + (i + self.all_to_all) % self.size)
            for g in range(self.groups)
            for i in range(self.size)
        ]


def context_layout(parallel: ParallelConfig, context: int, degree: int = 0) -> ContextLayout:
    """The cut that ``parallel.context_strategy`` makes over an axis of size ``context``.

    Keys and values travel between the members of a ring, or are gathered from them; heads are
    exchanged by the others. ``parallel.context_all_to_all`` has been checked.

    Args:
        parallel: the strategy.
        context: size of the axis.
        degree: members that share a sequence, a divisor of ``context``; 0: all. Where it is less
            than ``context_all_to_all``, all of them exchange heads.
    """
    degree = degree or context
    exchanging = {
        "all_gather": 1,
        "ring": 1,
        "all_to_all": degree,
        "hierarchical": min(parallel.context_all_to_all or 1, degree),
    }[parallel.context_strategy]
    return ContextLayout(degree // exchanging, exchanging, context // degree)
