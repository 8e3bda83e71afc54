"""Tensor-parallel blocks that work on parts of the sequence as they arrive.

With sequence parallelism each member of ``tensor`` has a part of the residual stream. An all-gather
before a block and a reduce-scatter behind it leave the block with nothing to multiply meanwhile.
Here every member sends its part to each of the others and begins with its own; what it has computed
for another's part it sends back while it computes the next (Wang et al. 2023,
doi:10.1145/3567955.3567959; Megatron-LM's ``--tp-comm-overlap``). These are permutations over
``tensor``, which within a process GPUs' copy engines can do. NCCL's kernels need multiprocessors,
and matrix products hold all of them.

Of parts in their *order of arrival* the first is this member's own, the next that of the member
behind it, and so on around ``tensor``.
"""

import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxtron.log_once import log_once
from jaxtron.parallel.config import ParallelConfig

logger = logging.getLogger(__name__)

Parts = tuple[jax.Array, ...]


def works_on_parts(
    parallel: ParallelConfig, mesh: Mesh, *, sequence_parallel: bool, copies: bool
) -> bool:
    """``parallel.tp_comm_overlap``, with null decided.

    Args:
        parallel: the configuration; checked.
        mesh: of the job.
        sequence_parallel: whether the residual stream is split over ``tensor``.
        copies: whether copy engines do permutations within a process.
    """
    if not sequence_parallel:
        return False
    copied = copies and len({device.process_index for device in mesh.devices.flat}) == 1
    asked = parallel.tp_comm_overlap
    found = copied and mesh.shape["pipeline"] == 1 if asked is None else asked
    if found:
        how = (" by copy engines" if copied else "") + (" (auto)" if asked is None else "")
        log_once(logger, f"tensor-parallel blocks work on parts as they arrive, sent{how}")
    return found


def _sent(x: jax.Array, ahead: int) -> jax.Array:
    """What the member ``ahead`` places behind this one has sent, when all do."""
    n = lax.axis_size("tensor")
    return lax.ppermute(x, "tensor", [(i, (i + ahead) % n) for i in range(n)])


def _receive(x: jax.Array) -> Parts:
    return (x, *(_sent(x, ahead) for ahead in range(1, lax.axis_size("tensor"))))


def _deliver(parts: Parts) -> jax.Array:
    mine = [parts[0], *(_sent(part, -back) for back, part in enumerate(parts) if back)]
    summed = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in mine))
    return summed.astype(parts[0].dtype)


def _join(parts: Parts) -> jax.Array:
    if len(parts) == 2:  # two operations that fuse with what stands around them
        first = lax.axis_index("tensor") == 0
        halves = jnp.where(first, *parts), jnp.where(first, *parts[::-1])
        return jnp.concatenate(halves, axis=1)
    # the last, ..., the own, the last, ...: from some place on, they are in the sequence's order
    around = jnp.concatenate([*parts[::-1], *parts[:0:-1]], axis=1)
    n, length = len(parts), parts[0].shape[1]
    start = (n - 1 - lax.axis_index("tensor")) * length
    return lax.dynamic_slice_in_dim(around, start, n * length, 1)


def _cut(x: jax.Array) -> Parts:
    n = lax.axis_size("tensor")
    own, length = lax.axis_index("tensor"), x.shape[1] // n
    return tuple(
        lax.dynamic_slice_in_dim(x, (own - back) % n * length, length, 1) for back in range(n)
    )


@jax.custom_vjp
def receive(x: jax.Array) -> Parts:
    """Every member's ``x [...]``, in order of arrival."""
    return _receive(x)


@jax.custom_vjp
def deliver(parts: Parts) -> jax.Array:
    """The sum over ``tensor`` of what each member has for this one's part.

    Args:
        parts: ``[...]`` each, for the parts in order of arrival.

    Returns:
        ``[...]``, added in fp32, whatever the format in which the terms travel.
    """
    return _deliver(parts)


@jax.custom_vjp
def join(parts: Sequence[jax.Array]) -> jax.Array:
    """Whole sequences ``[b, s, ...]`` of the parts ``[b, s/tensor, ...]`` in order of arrival."""
    return _join(tuple(parts))


@jax.custom_vjp
def cut(x: jax.Array) -> Parts:
    """The inverse of :func:`join`."""
    return _cut(x)


receive.defvjp(lambda x: (_receive(x), None), lambda _, g: (_deliver(g),))
deliver.defvjp(lambda parts: (_deliver(parts), None), lambda _, g: (_receive(g),))
join.defvjp(lambda parts: (_join(parts), None), lambda _, g: (_cut(g),))
cut.defvjp(lambda x: (_cut(x), None), lambda _, g: (_join(g),))
