"""Configuration of the device mesh and of how the work is split over it."""

from typing import Literal

from jaxtron.config.fields import key, section

DataSharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@section
class ParallelConfig:
    """Sizes of the six mesh axes and the strategies that use them."""

    data: int = key(1, "Replicas of the whole sharded model (HSDP when fsdp > 1).")
    fsdp: int = key(-1, "Data-parallel axis over which state is sharded; -1: what is left.")
    pipeline: int = key(1, "Pipeline stages.")
    tensor: int = key(1, "Tensor parallelism: heads, ffn and vocabulary are split over it.")
    context: int = key(1, "Context parallelism: the sequence is split over it.")
    expert: int = key(1, "Expert parallelism; an extra data axis for dense layers.")
    sequence_parallel: bool | None = key(
        None, "Split the sequence over `tensor` between blocks; null: on when tensor > 1."
    )
    data_sharding: DataSharding = key(
        "optim", "What is sharded over fsdp: nothing, optimizer state, + gradients, + parameters."
    )
    reshard_after_forward: bool = key(
        True, "With optim_grads_params: free gathered weights after the forward, gather again."
    )
    rules: dict[str, str | list[str] | None] = key(
        {}, "Overrides of the logical-axis table: logical name -> mesh axis, list of axes, or null."
    )
