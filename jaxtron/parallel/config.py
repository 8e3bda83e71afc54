"""Configuration of the device mesh and of how the work is split over it."""

from typing import Literal

from jaxtron.config.fields import key, section

ContextStrategy = Literal["all_gather", "ring", "all_to_all", "hierarchical"]
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
    overlap_param_gather: bool | None = key(
        None,
        "Gather later layers' weights while the first microbatch computes; null: on GPUs, where "
        "they are gathered before a step and the loop over layers is unrolled. The layers are "
        "compiled once more.",
    )
    overlap_grad_reduce: bool | None = key(
        None,
        "Sum later layers' gradients over devices while the last microbatch's backward pass goes "
        "on; null: on GPUs, where they are summed once a step and the layers are unrolled. The "
        "layers are compiled once more.",
    )
    reduce_scatter_with_fp32_accumulation: bool | None = key(
        None,
        "Where 16-bit gradients are scattered over fsdp and added in fp32, exchange them as they "
        "are and let each device add, instead of a reduce-scatter of fp32; null: where the devices "
        "that share a parameter are of one host, and there is no pipeline.",
    )
    tp_comm_overlap: bool | None = key(
        None,
        "With sequence parallelism, let tensor-parallel blocks work on parts of the sequence as "
        "they arrive from the other devices, and send results while the next is computed; null: "
        "where copy engines can send (one process with all GPUs), without a pipeline.",
    )
    context_strategy: ContextStrategy = key(
        "all_gather",
        "How attention reaches the other parts of the sequence: gather keys and values, pass them "
        "around a ring, exchange heads (all_to_all), or exchange heads in groups of "
        "context_all_to_all with a ring across them (hierarchical).",
    )
    context_all_to_all: int | None = key(
        None, "Members of context that exchange heads with each other; hierarchical only.", ge=2
    )
    context_cut_documents: int | None = key(
        None,
        "Cut each document of a packed row that has this many tokens or more in zig-zag chunks of "
        "its own, so that the members of a ring or all_gather share its work; null: cut rows.",
        ge=1,
    )
    dynamic_context: bool = key(
        False,
        "Cut every step's documents into microbatches of their own, in which a document is split "
        "over few or many devices of context by its length; needs packed data.",
    )
    min_dynamic_context: int = key(
        1, "Devices that share a document at least under dynamic_context; a power of two.", ge=1
    )
    max_seqlen_per_dp_cp_rank: int | None = key(
        None,
        "Tokens of a microbatch on a device under dynamic_context, which memory limits; null: "
        "data.seq_length / context.",
        ge=1,
    )
    virtual_pipeline: int = key(1, "Chunks of layers (virtual stages) on each pipeline stage.")
    pipeline_schedule: str = key(
        "1f1b", "gpipe, 1f1b, interleaved (virtual_pipeline 2 or more), or module:function."
    )
    pipeline_layout: str | None = key(
        None, "Layers of each virtual stage in Megatron's form, Et*3|(tt|)*29tt|L; null: even."
    )
    rules: dict[str, str | list[str] | None] = key(
        {}, "Overrides of the logical-axis table: logical name -> mesh axis, list of axes, or null."
    )
