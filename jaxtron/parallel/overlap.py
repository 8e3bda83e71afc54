"""Collectives of the data-parallel axes beside products: microbatches outside of the loop.

Copies of the weights are gathered before the first microbatch, and gradients are summed over
devices after the last. A loop over the microbatches waits for all it reads, and hands out its
results at its end. A first microbatch outside of it begins when the first layer's copies are there,
and those of later layers arrive beside its products; during a last one outside, the sum of a
layer's gradients begins as soon as its backward pass has ended (Megatron-LM's
``--overlap-param-gather`` and ``--overlap-grad-reduce``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtron.errors import ConfigError
from jaxtron.mesh.axes import BATCH_AXES
from jaxtron.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Overlap:
    """Whether the first and the last microbatch of a step stand outside of the loop."""

    param_gather: bool
    grad_reduce: bool


NO_OVERLAP = Overlap(param_gather=False, grad_reduce=False)


def plan_overlap(
    parallel: ParallelConfig, sizes: Mapping[str, int], *, unroll: bool, platform: str
) -> Overlap:
    """``parallel.overlap_param_gather`` and ``overlap_grad_reduce``, with null decided.

    Null is on where there is something to hide, on GPUs.

    Args:
        parallel: the configuration.
        sizes: of the mesh axes.
        unroll: whether the loop over layers is unrolled: in a scan there are no copies and
            gradients of single layers.
        platform: of the devices.

    Raises:
        ConfigError: one of them is on where it can't act.
    """
    level, stages = parallel.data_sharding, sizes["pipeline"]
    reasons = [
        (
            stages > 1,
            f"parallel.pipeline is {stages}, whose schedule has the microbatches",
        ),
        (parallel.dynamic_context, "parallel.dynamic_context makes microbatches of its own"),
        (not unroll, "the loop over layers is a scan: set train.layer_loop to unroll"),
    ]
    gathered = level in ("optim", "optim_grads")
    summed_once = level in ("no_shard", "optim")
    gather = _decide(
        "overlap_param_gather",
        parallel.overlap_param_gather,
        [*reasons, (not gathered, f"parallel.data_sharding {level} gathers nothing before a step")],
        default=platform != "cpu" and sizes["fsdp"] > 1,
    )
    reduce = _decide(
        "overlap_grad_reduce",
        parallel.overlap_grad_reduce,
        [*reasons, (not summed_once, f"parallel.data_sharding {level} sums in every microbatch")],
        default=platform != "cpu" and any(sizes[axis] > 1 for axis in (*BATCH_AXES, "context")),
    )
    return Overlap(gather, reduce)


def _decide(
    name: str, asked: bool | None, reasons: list[tuple[bool, str]], *, default: bool
) -> bool:
    against = [reason for holds, reason in reasons if holds]
    if asked and against:
        raise ConfigError(
            f"parallel.{name} is true, but {'; '.join(against)} (set parallel.{name} to null)"
        )
    if asked is None:
        return default and not against
    return asked
