"""Summing over devices as an exchange of parts (all-to-all).

Within a process XLA can exchange by GPUs' copy engines, which need no multiprocessors. NCCL's
kernels do, and matrix products take all of them: what NCCL sends beside a product arrives after it.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxtron.mesh.mesh import process_axis


def exchanged_sum(parts: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum over the members of ``axes`` of the part that each has for this one.

    Args:
        parts: ``[members, ...]``, one for every member.
        axes: mesh axes.

    Returns:
        ``[...]``, added in fp32 in the order of the members, as fp32.
    """
    mine = lax.all_to_all(parts, tuple(axes), 0, 0)
    total = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in mine))
    # two parts are as large as their sum, and are added where it is used; more would be kept
    return total if len(parts) == 2 else lax.optimization_barrier(total)


def exchanges_in_process(mesh: Mesh, *, gradients: bool, ragged: bool) -> bool:
    """Whether a training step may let copy engines do what it exchanges within a process.

    XLA's devices of a process then wait for each other's streams, those of other groups too. Where
    a process has several groups, one may be behind by an iteration of a loop and wait for what
    another sends only after it, so there must be a single one. Branches of a pipeline and subgroups
    of ``context`` are left to NCCL.

    Args:
        mesh: of the job.
        gradients: whether gradients are.
        ragged: whether experts' tokens are exchanged in parts of different size.
    """
    by_axis = {"fsdp": gradients, "expert": gradients and not ragged}
    return mesh.shape["pipeline"] == 1 and by_axis.get(process_axis(mesh) or "", False)
