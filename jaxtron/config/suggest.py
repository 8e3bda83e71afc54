"""Nearest keys for a key that does not exist."""

import difflib

from jaxtron.config.schema import keys, sections

_FROM_MEGATRON = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "num_virtual_stages_per_pipeline_rank": "parallel.virtual_pipeline",
    "pipeline_model_parallel_layout": "parallel.pipeline_layout",
    "context_parallel_size": "parallel.context",
    "cp_comm_type": "parallel.context_strategy",
    "hierarchical_context_parallel_sizes": "parallel.context_all_to_all",
    "expert_model_parallel_size": "parallel.expert",
    "data_parallel_size": "parallel.fsdp",
    "use_distributed_optimizer": "parallel.data_sharding",
    "data_parallel_sharding_strategy": "parallel.data_sharding",
    "train_iters": "train.steps",
    "exit_duration_in_mins": "train.exit_duration_min",
    "bf16": "precision.compute",
    "lr_warmup_iters": "optimizer.lr_warmup_steps",
    "lr_decay_iters": "optimizer.lr_decay_steps",
    "data_path": "data.paths",
    "tokenizer_model": "data.tokenizer",
    "save": "checkpoint.dir",
    "save_interval": "checkpoint.interval",
    "eval_interval": "eval.interval",
    "eval_iters": "eval.iters",
    "tensorboard_dir": "observe.dir",
    "swiglu": "model.activation",
    "calculate_per_token_loss": "loss.reduction",
}
"""Megatron-LM's names where ours differ; only those whose key exists are offered."""


def did_you_mean(dotted: str, count: int = 3) -> str:
    """``": did you mean a, b?"`` with the nearest of all keys, or a pointer to the list.

    The same name in another section comes first, then Megatron's name for a key, then spelling.
    """
    known = keys()
    section, _, name = dotted.rpartition(".")
    name = name.replace("-", "_").lower()
    found = [key for key, info in known.items() if info.name == name]
    if _FROM_MEGATRON.get(name) in known:
        found.append(_FROM_MEGATRON[name])
    found += difflib.get_close_matches(f"{section}.{name}", known, n=count, cutoff=0.75)
    names = {info.name for info in known.values()}
    for near in difflib.get_close_matches(name, names, n=count, cutoff=0.75):
        found += [key for key, info in known.items() if info.name == near]
    if not section:
        found += difflib.get_close_matches(name, sections(), n=1)
    offered = list(dict.fromkeys(found))[:count]
    if offered:
        return f": did you mean {', '.join(offered)}?"
    return "; `jaxtron train --help-config` lists all keys"
