"""In which format gradients travel to be summed over devices, and who adds them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxtron.errors import ConfigError
from jaxtron.log_once import log_once
from jaxtron.mesh.mesh import within_host
from jaxtron.parallel.config import ParallelConfig
from jaxtron.parallel.exchange import exchanged_sum
from jaxtron.precision.config import PrecisionConfig
from jaxtron.precision.dtypes import DTYPES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed over devices.

    Attributes:
        dtype: in which they are added.
        exchange: whether 16-bit gradients that are added in fp32 travel as they are, an all-to-all,
            and every device adds the parts of its shard (Megatron-LM's
            ``reduce_scatter_with_fp32_accumulation``). The sums are those of a reduce-scatter in
            fp32, of half the bytes; no fp32 copy of a gradient is written.
    """

    dtype: Any
    exchange: bool = False

    def scatter(self, g: jax.Array, axes: Sequence[str], dim: int) -> jax.Array:
        """The sum of ``g`` over ``axes``, of which each member keeps its part along ``dim``.

        Returns:
            ``g`` with ``dim`` shortened by the size of ``axes``, in :attr:`dtype`.
        """
        axes = tuple(axes)
        if not (self.exchange and g.dtype.itemsize == 2 and self.dtype == jnp.float32):
            return lax.psum_scatter(g.astype(self.dtype), axes, scatter_dimension=dim, tiled=True)
        count = lax.axis_size(axes)
        parts = g.reshape(*g.shape[:dim], count, g.shape[dim] // count, *g.shape[dim + 1 :])
        return exchanged_sum(jnp.moveaxis(parts, dim, 0), axes)


def plan_reduction(
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    mesh: Mesh,
    zero_axes: Sequence[str],
    *,
    microbatches: int | None,
) -> Reduction:
    """``parallel.reduce_scatter_with_fp32_accumulation``, with null decided, and its dtype.

    Null is on where the devices that share a parameter are of one host. Between hosts a
    reduce-scatter may be better: it adds up within a host first, and every sum travels once. In a
    pipeline, where gradients are scattered in branches, the exchange has not been run on GPUs.

    Args:
        parallel: the configuration.
        precision: the configuration.
        mesh: of the job.
        zero_axes: mesh axes over which parameters are stored in pieces.
        microbatches: of a step, all in one executable; None: that varies.

    Raises:
        ConfigError: it is on where all gradients are summed otherwise.
    """
    asked = parallel.reduce_scatter_with_fp32_accumulation
    level = parallel.data_sharding
    once = level == "optim" and precision.grads == "fp32" and not parallel.dynamic_context
    reasons: Mapping[str, bool] = {
        "parallel.data_sharding is no_shard, which scatters nothing": level == "no_shard",
        "precision.compute is fp32, and so are all gradients": precision.compute == "fp32",
        "precision.grad_reduce is bf16": precision.grad_reduce == "bf16",
        "parallel.pipeline adds up a step's microbatches in fp32 before they are scattered": (
            once and parallel.pipeline > 1
        ),
        f"a step's {microbatches or 'many'} microbatches are added up in fp32 before they are "
        "scattered (parallel.data_sharding optim)": once and microbatches != 1,
    }
    against = [reason for reason, holds in reasons.items() if holds]
    if asked and against:
        raise ConfigError(
            f"parallel.reduce_scatter_with_fp32_accumulation is true, but {'; '.join(against)} "
            "(set it to null)"
        )
    one_host, stages = within_host(mesh, zero_axes), parallel.pipeline
    exchange = (one_host and stages == 1) if asked is None else asked
    if zero_axes and not against:
        over = "+".join(zero_axes)
        how = (
            f"{precision.compute} parts are exchanged and added in fp32"
            if exchange
            else "reduce-scatter in fp32"
        )
        if asked is None:
            no = f"of {stages} pipeline stages" if one_host else "they are on several hosts"
            how += " (auto)" if exchange else f", because {no} (auto)"
        log_once(logger, f"gradients over {over}: {how}")
    return Reduction(jnp.dtype(DTYPES[precision.grad_reduce]), exchange)
