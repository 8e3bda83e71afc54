"""Gathering and summing over devices as an exchange of parts (all-to-all).

Within a process XLA can exchange by GPUs' copy engines, which need no multiprocessors. NCCL's
kernels do, and matrix products take all of them: what NCCL sends beside a product arrives after it.
"""

import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh

from jaxtron.log_once import log_once
from jaxtron.mesh.mesh import process_axis
from jaxtron.parallel.config import ParallelConfig

logger = logging.getLogger(__name__)

TENSOR = ("tensor",)


def exchanged_sum(parts: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum over the members of ``axes`` of the part that each has for this one.

    Args:
        parts: ``[members, ...]``, one for every member.
        axes: mesh axes.

    Returns:
        ``[...]``, added in fp32 in the order of the members, as fp32.
    """
    total = _sum(lax.all_to_all(parts, tuple(axes), 0, 0))
    # two parts are as large as their sum, and are added where it is used; more would be kept
    return total if len(parts) == 2 else lax.optimization_barrier(total)


def _sum(parts: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))


def _gather(x: jax.Array) -> jax.Array:
    copies = jnp.broadcast_to(x, (lax.axis_size(TENSOR), *x.shape))
    return lax.all_to_all(copies, TENSOR, 0, 0, tiled=True)  # tiled: see is_gather


def _scatter(x: jax.Array) -> jax.Array:
    parts = lax.all_to_all(x, TENSOR, 0, 0)
    return _sum(parts).astype(x.dtype)


@jax.custom_vjp
def gather_tensor(x: jax.Array) -> jax.Array:
    """``[...]`` of every member of ``tensor``: ``[tensor, ...]``."""
    return _gather(x)


@jax.custom_vjp
def scatter_tensor(x: jax.Array) -> jax.Array:
    """This member's part of the sum over ``tensor``: ``[tensor, ...] -> [...]``.

    Added in fp32, whatever the format in which it travels.
    """
    return _scatter(x)


gather_tensor.defvjp(lambda x: (_gather(x), None), lambda _, g: (_scatter(g),))
scatter_tensor.defvjp(lambda x: (_scatter(x), None), lambda _, g: (_gather(g),))


def exchanges_stream(
    parallel: ParallelConfig, mesh: Mesh, *, sequence_parallel: bool, copies: bool
) -> bool:
    """``parallel.tp_comm_overlap``, with null decided.

    Args:
        parallel: the configuration; checked.
        mesh: of the job.
        sequence_parallel: whether the residual stream is split over ``tensor``.
        copies: whether copy engines do what is exchanged within a process.
    """
    asked = parallel.tp_comm_overlap
    copied = copies and exchanges_in_process(mesh, stream=True, gradients=False, ragged=False)
    found = sequence_parallel and (copied if asked is None else asked)
    if found:
        how = (" by copy engines" if copied else "") + (" (auto)" if asked is None else "")
        log_once(logger, f"tensor-parallel parts of the residual stream are exchanged{how}")
    return found


def exchanges_in_process(mesh: Mesh, *, stream: bool, gradients: bool, ragged: bool) -> bool:
    """Whether a training step may let copy engines do what it exchanges within a process.

    XLA's devices of a process then wait for each other's streams, those of other groups too. Where
    a process has several groups, one may be behind by an iteration of a loop and wait for what
    another sends only after it, so there must be a single one. Branches of a pipeline and subgroups
    of ``context`` are left to NCCL.

    Args:
        mesh: of the job.
        stream: whether tensor-parallel parts are exchanged.
        gradients: whether gradients are.
        ragged: whether experts' tokens are exchanged in parts of different size.
    """
    by_axis = {"tensor": stream, "fsdp": gradients, "expert": gradients and not ragged}
    return mesh.shape["pipeline"] == 1 and by_axis.get(process_axis(mesh) or "", False)


def is_gather(equation: JaxprEqn) -> bool:
    """Whether the operation is an all-gather over ``tensor``, or its exchange.

    Of a first dimension that counts the members, an exchange with ``tiled`` is the same as one
    without: here it tells what is exchanged.
    """
    return _over_tensor(equation, "all_gather") or (
        _over_tensor(equation, "all_to_all") and equation.params["tiled"]
    )


def is_scatter(equation: JaxprEqn) -> bool:
    """Whether the operation is a reduce-scatter over ``tensor``, or the exchange before a sum."""
    return _over_tensor(equation, "reduce_scatter") or (
        _over_tensor(equation, "all_to_all") and not equation.params["tiled"]
    )


def _over_tensor(equation: JaxprEqn, name: str) -> bool:
    return equation.primitive.name == name and equation.params["axis_name"] in (TENSOR, *TENSOR)
