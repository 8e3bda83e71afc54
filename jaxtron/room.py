"""Whether the devices have room for what a run is about to put on them.

XLA plans a program's memory to the byte when it compiles it. A device that runs out of memory in
the middle of a step leaves the others waiting for it in their next collective, often for ever: so a
step that cannot fit is refused before it runs.
"""

import gc
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxtron.config.config import Config
from jaxtron.errors import ConfigError
from jaxtron.parallel.state_sharding import HOST

if TYPE_CHECKING:
    from jaxtron.program import Program

GIB = 2**30


def free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Memory that the fullest of the devices has left; None where they do not count (CPUs)."""
    left = [
        stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        for device in devices
        if "bytes_limit" in (stats := device.memory_stats() or {})
    ]
    return min(left) if left else None


def array_bytes(tree: Any) -> int:
    """Bytes of one device's shards of arrays, given with their shardings; not those on the host."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != HOST
    )


def program_bytes(compiled: Any) -> int:
    """Bytes that a compiled program allocates on a device besides its arguments.

    0 if its plan is not known.
    """
    plan = compiled.memory_analysis()
    if plan is None:
        return 0
    outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return int(plan.temp_size_in_bytes + outputs)


def check_state(program: "Program") -> None:
    """Refuse a state for which the devices have no room; before it is made or restored.

    Raises:
        ConfigError: with what it needs, what is left, and what would help.
    """
    what = "the state (fp32 weights and moments)"
    _check(array_bytes(program.placed_state()), program, what, _state_remedies(program.config))


def check_step(program: "Program", needed: int) -> None:
    """Refuse a training step for which the devices have no room beside its arguments.

    Args:
        program: of the run.
        needed: ``step_bytes`` of what takes the steps.

    Raises:
        ConfigError: with what it needs, what is left, and what would help.
    """
    remedies = _step_remedies(program.config, program.batch_layout.micro_batch_size)
    _check(needed, program, "a training step, besides its state,", remedies)


def _check(needed: int, program: "Program", what: str, remedies: Iterator[str]) -> None:
    devices = program.mesh.local_devices
    free = free_bytes(devices)
    if free is not None and needed > free:
        gc.collect()  # arrays that nobody reads any more
        free = free_bytes(devices)
    if free is None or needed <= free:
        return
    raise ConfigError(
        f"{what} needs {needed / GIB:.1f} GiB of each device, where {free / GIB:.1f} GiB are left "
        "(of what runtime.gpu_memory_fraction reserves and other programs on the card leave): "
        f"{'; or '.join(remedies)}"
    )


def _state_remedies(config: Config) -> Iterator[str]:
    """What would lower the bytes of a run's state and is not set yet."""
    if config.parallel.data_sharding == "no_shard":
        yield "set parallel.data_sharding to optim or higher"
    if not config.optimizer.offload:
        yield "keep the moments on the host (optimizer.offload)"
    yield "split the model over more devices (parallel.fsdp, tensor, pipeline, expert)"


def _step_remedies(config: Config, micro_batch_size: int) -> Iterator[str]:
    """What would lower the bytes that a step needs besides the state, and is not set yet."""
    if config.train.microbatches_at_once > 1:
        yield "set train.microbatches_at_once to 1"
    if config.parallel.dynamic_context:
        yield "lower parallel.max_seqlen_per_dp_cp_rank"
    elif micro_batch_size > 1:
        yield f"take smaller microbatches than {micro_batch_size} (train.micro_batch_size)"
    if config.train.recompute != "full":
        yield "set train.recompute to full, or to a policy by activation"
    if config.loss.chunk_tokens is None:
        yield "compute the logits of fewer tokens at a time (loss.chunk_tokens)"
    if config.parallel.data_sharding in ("no_shard", "optim"):
        yield "set parallel.data_sharding to optim_grads"
    yield "split the model over more devices (parallel.fsdp, tensor, pipeline, context, expert)"
