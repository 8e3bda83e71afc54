"""The manual region: what one device knows of the mesh, and the verbs layers use.

The loss and its gradients are computed in one ``jax.shard_map``, manual over every mesh axis.
There, each device computes a *piece* of the objective such that the sum of the pieces over all
devices is the loss: a value that several devices hold alike is divided by their number. Then the
transpose of every collective below is exact, and a parameter's gradient is the sum over the axes on
which the parameter is replicated (``data_sharding.py``).

Between blocks the residual stream is ``[batch, sequence, embed]``. With sequence parallelism its
sequence is split over ``tensor`` (Korthikanti et al. 2022, arXiv:2205.05198), otherwise every
member of a tensor group holds it whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.parallel import tensor_parts

VOCAB_AXES = ("pipeline", "tensor")
"""Mesh axes that share the work of embedding and output layer, slowest first."""


@dataclass(frozen=True)
class Region:
    """Sizes of the mesh axes, and how members of ``tensor`` share the residual stream.

    Attributes:
        sizes: of every mesh axis.
        sequence_parallel: whether the residual stream is split over ``tensor``.
        in_parts: whether blocks work on its parts as they arrive (``tensor_parts.py``).
    """

    sizes: Mapping[str, int]
    sequence_parallel: bool
    in_parts: bool = False

    @property
    def tensor(self) -> int:
        """Size of the tensor axis."""
        return self.sizes["tensor"]

    def index(self, axis: str) -> jax.Array | int:
        """This device's position on ``axis``."""
        return lax.axis_index(axis) if self.sizes[axis] > 1 else 0

    def live(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of ``axes`` that have more than one member."""
        return tuple(a for a in axes if self.sizes[a] > 1)

    @property
    def vocab_parts(self) -> int:
        """Devices that share the vocabulary's work, on the same tokens."""
        return self.sizes["pipeline"] * self.sizes["tensor"]

    def vocab_start(self, rows: int) -> jax.Array | int:
        """First id of this device's ``rows`` of the vocabulary.

        Where ``parallel.rules`` leaves the vocabulary whole, this is 0 on one device, which does
        all of the work, and beyond the last id on the others.
        """
        return (self.index("pipeline") * self.tensor + self.index("tensor")) * rows

    def sum(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Sum over the members of ``axes``; no operation when there is one member."""
        live = self.live(axes)
        return lax.psum(x, live) if live else x

    def max(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Maximum over the members of ``axes``; has no derivative."""
        live = self.live(axes)
        return lax.pmax(lax.stop_gradient(x), live) if live else lax.stop_gradient(x)

    def gather_parts(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Enter a tensor-parallel block: what it multiplies, as it arrives.

        Of ``x [b, s/tensor, ...]`` either one array ``[tensor, b, s/tensor, ...]``, whose first
        dimension counts the parts of the sequence, or with :attr:`in_parts` as many arrays ``[b,
        s/tensor, ...]``. Nothing is moved to join them, and what treats tokens alike can go on with
        each; :meth:`join` makes sequences of them. Without sequence parallelism the stream is whole
        already, one array ``[b, s, ...]``. The name keeps a part from being sent again where a
        backward pass repeats data movement (``layers/remat.py``).
        """
        if not self.sequence_parallel:
            return (x,)
        parts = tensor_parts.receive(x) if self.in_parts else (lax.all_gather(x, "tensor"),)
        return tuple(checkpoint_name(part, "gathered_sequence") for part in parts)

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Whole sequences ``[b, s, ...]`` of the parts that :meth:`gather_parts` makes."""
        if self.in_parts:
            return tensor_parts.join(tuple(parts))
        (x,) = parts
        if not self.sequence_parallel:
            return x
        count, rows, length, *rest = x.shape
        return x.swapaxes(0, 1).reshape(rows, count * length, *rest)

    def cut(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """The inverse of :meth:`join`."""
        if self.in_parts:
            return tensor_parts.cut(x)
        if not self.sequence_parallel:
            return (x,)
        rows, length, *rest = x.shape
        return (x.reshape(rows, self.tensor, length // self.tensor, *rest).swapaxes(0, 1),)

    def reduce_parts(self, parts: Sequence[jax.Array], partial: bool = True) -> jax.Array:
        """Leave a tensor-parallel block: sum over ``tensor`` what :meth:`gather_parts` entered.

        The result is the residual stream's form: ``[b, s/tensor, ...]`` with sequence parallelism,
        ``[b, s, ...]`` without. ``partial`` is False for a block whose weights every member holds
        whole (``parallel.rules``): each has the complete sum, and nothing is added.
        """
        if self.in_parts:
            return tensor_parts.deliver(tuple(parts)) if partial else parts[0]
        (x,) = parts
        if not self.sequence_parallel:
            return lax.psum(x, "tensor") if partial and self.tensor > 1 else x
        if not partial:
            return lax.dynamic_index_in_dim(x, lax.axis_index("tensor"), 0, keepdims=False)
        return lax.psum_scatter(x, "tensor")

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        """Whole sequences of the residual stream: ``[b, s/tensor, ...] -> [b, s, ...]``."""
        return self.join(self.gather_parts(x))

    def reduce_sequence(self, x: jax.Array) -> jax.Array:
        """Sum partial whole sequences ``[b, s, ...]`` over ``tensor`` to the residual stream."""
        return self.reduce_parts(self.cut(x))

    def own_sequence(self, x: jax.Array, axis: int) -> jax.Array:
        """The part of a whole-sequence array that matches this device's residual stream."""
        if not self.sequence_parallel:
            return x
        part = x.shape[axis] // self.tensor
        return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * part, part, axis)

    def own_groups(self, x: jax.Array, groups: int, axis: int) -> jax.Array:
        """This device's key/value heads out of a weight that holds ``x.shape[axis]`` of them.

        A weight split over ``tensor`` holds the right ones already. Of one that is replicated, each
        member uses the groups its query heads belong to: several, or a share of one.
        """
        if self.tensor == 1 or x.shape[axis] < groups:
            return x
        start = jnp.asarray(lax.axis_index("tensor") * groups // self.tensor)
        return lax.dynamic_slice_in_dim(x, start, max(1, groups // self.tensor), axis)
