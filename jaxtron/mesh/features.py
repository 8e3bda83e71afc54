"""What each feature of a configuration amounts to on a mesh: really on, and in which form."""

from jaxtron.config.run import TrainConfig
from jaxtron.mesh.inspect import Inspection
from jaxtron.precision.config import PrecisionConfig


def features(inspection: Inspection) -> list[tuple[str, str]]:
    """Pairs of a feature's name and its effective value."""
    config = inspection.config
    model, train = config.model, config.train
    output = "own weight" if model.untie_embeddings_and_output_weights else "tied to the embedding"
    return [
        ("parameters", f"{inspection.parameter_count:,}{_padding(inspection)}"),
        ("batch", _batch(inspection)),
        ("data sharding", _data_sharding(inspection)),
        ("tensor parallelism", _tensor(inspection)),
        ("sequence parallelism", _sequence(inspection)),
        ("context parallelism", _context(inspection)),
        ("pipeline parallelism", _pipeline(inspection)),
        ("experts", _experts(inspection)),
        ("output layer", output),
        ("precision", _precision(config.precision)),
        ("recompute", _recompute(train)),
        ("training", inspection.refusal or "possible in this version"),
    ]


def _padding(inspection: Inspection) -> str:
    model = inspection.config.model
    rows = model.padded_vocab_size - model.vocab_size
    return f" (vocabulary {model.vocab_size:,} padded by {rows} rows)" if rows else ""


def _batch(inspection: Inspection) -> str:
    cut = inspection.batch
    if inspection.config.parallel.dynamic_context:
        return (
            f"{cut.global_batch_size} sequences, whose documents are cut into microbatches in each "
            f"step for {cut.data_shards} data shards"
        )
    return (
        f"{cut.global_batch_size} sequences = {cut.num_microbatches} microbatches × "
        f"{cut.data_shards} data shards × {cut.micro_batch_size}"
    )


def _data_sharding(inspection: Inspection) -> str:
    level = inspection.config.parallel.data_sharding
    axes = inspection.rules.axes("zero")
    if level == "no_shard":
        return "no_shard: every data shard holds all of the state"
    if not axes:
        configured = ", ".join(inspection.rules.table["zero"])
        return f"{level}, without effect: its axes ({configured}) have size 1"
    what = {
        "optim": "optimizer state and master weights",
        "optim_grads": "optimizer state, master weights and gradients",
        "optim_grads_params": "optimizer state, gradients and parameters",
    }[level]
    replicas = inspection.sizes["data"]
    copies = f", in {replicas} replicas (HSDP)" if replicas > 1 else ""
    text = f"{level}: {what} in {inspection.rules.size('zero')} parts over {'+'.join(axes)}{copies}"
    whole = [
        param.name
        for param in inspection.params
        if not param.layout.zero_axes
        and sum(n != "layers" for n in param.layout.logical) > 1
        and not param.name.endswith("bias")
    ]
    less = [
        f"{param.name} over {'+'.join(param.layout.zero_axes)}"
        for param in inspection.params
        if param.layout.zero_axes and set(axes) & set(param.layout.replicated_axes)
    ]
    text += f"; divided by some of them alone: {', '.join(less)}" if less else ""
    return text + (f"; not divided by them and kept whole: {', '.join(whole)}" if whole else "")


def _tensor(inspection: Inspection) -> str:
    tensor, model = inspection.sizes["tensor"], inspection.config.model
    if tensor == 1:
        return "off"
    groups = model.query_groups
    kv = f"{groups // tensor}" if groups >= tensor else f"1 of {groups}, replicated"
    return (
        f"{tensor} parts; a device has {model.num_attention_heads // tensor} query heads, "
        f"{kv} key/value heads, {model.ffn_hidden_size // tensor} ffn channels"
    )


def _experts(inspection: Inspection) -> str:
    model, rules = inspection.config.model, inspection.rules
    if model.num_experts is None:
        return "none"
    parts, inner = rules.size("experts"), rules.size("expert_mlp")
    over = f" over {'+'.join(rules.axes('experts'))}" if parts > 1 else ""
    width = f", {model.expert_ffn // inner} of {model.expert_ffn} ffn channels" if inner > 1 else ""
    how = f"dispatcher {model.moe_token_dispatcher_type}" if parts > 1 else "no dispatch"
    return (
        f"{model.num_experts} a layer, {model.moe_router_topk} a token; a device has "
        f"{model.num_experts // parts}{over}{width}, {how}"
    )


def _sequence(inspection: Inspection) -> str:
    asked, tensor = inspection.config.parallel.sequence_parallel, inspection.sizes["tensor"]
    if tensor == 1:
        return "off (tensor is 1)"
    if asked is False:
        return "off: every member of a tensor group holds the whole residual stream"
    return f"on: {tensor} parts between blocks" + ("" if asked else " (by default, tensor > 1)")


def _context(inspection: Inspection) -> str:
    size, parallel = inspection.sizes["context"], inspection.config.parallel
    if size == 1:
        return "off"
    how = {
        "all_gather": "keys and values gathered",
        "ring": "keys and values passed around a ring",
        "all_to_all": "heads exchanged for tokens",
        "hierarchical": f"heads exchanged in groups of {parallel.context_all_to_all}, "
        "keys and values passed around a ring across them",
    }[parallel.context_strategy]
    if parallel.dynamic_context:
        how += f"; {parallel.min_dynamic_context} to {size} parts by a document's length"
    least = parallel.context_cut_documents
    apart = "" if least is None else f"; documents of {least} tokens or more cut by themselves"
    return f"{size} parts of the sequence, {parallel.context_strategy}: {how}{apart}"


def _precision(precision: PrecisionConfig) -> str:
    text = f"compute {precision.compute}, gradients summed in {precision.grad_reduce}"
    if precision.fp8 is None:
        return text
    experts = " and routed experts" if precision.fp8_experts else ""
    less = precision.first_last_layers_bf16 or precision.fp8_exceptions
    return (
        f"{text}; products of layers{experts} in FP8 ({precision.fp8}, {precision.fp8_format})"
        + (", with exceptions" if less else "")
    )


def _recompute(train: TrainConfig) -> str:
    if isinstance(train.recompute, dict):
        listed = [f"{name} {action}" for name, action in train.recompute.items()]
        return ", ".join([*listed, "other named activations saved"])
    if train.recompute_method == "uniform":
        return f"full, in groups of {train.recompute_num_layers} layers"
    if train.recompute_method == "block":
        return f"full, in the first {train.recompute_num_layers} layers"
    return train.recompute


def _pipeline(inspection: Inspection) -> str:
    parallel, stages = inspection.config.parallel, inspection.sizes["pipeline"]
    if stages == 1:
        return "off"
    counts = [sum(chunks) for chunks in inspection.placement.counts]
    each = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    chunks = parallel.virtual_pipeline
    cut = f" in {chunks} chunks" if chunks > 1 else ""
    return f"{stages} stages of {each} layers{cut}, schedule {parallel.pipeline_schedule}"
