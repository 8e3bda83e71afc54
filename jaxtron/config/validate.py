"""Combinations of keys that cannot work, each found before anything is built, with its fix.

:func:`validate` holds for every use of a configuration (training, mesh inspection, conversion) on
any machine; :func:`validate_for_training` adds what only a training run needs.
"""

import math
from collections.abc import Callable, Iterator, Mapping

from jaxtron.config.batch import batch_layout
from jaxtron.config.batch_schedule import batch_schedule
from jaxtron.config.config import Config
from jaxtron.config.validate_dynamic_context import DYNAMIC_CONTEXT_CHECKS
from jaxtron.config.validate_moe import MOE_LAYOUT_CHECKS, MOE_MODEL_CHECKS
from jaxtron.data.tokenizers import load_tokenizer
from jaxtron.errors import ConfigError, JaxtronError
from jaxtron.layers.rope import rope_scaling_parameters
from jaxtron.mesh.axes import resolve_axes
from jaxtron.mesh.rules import check_layers, make_rules
from jaxtron.models.config import ModelConfig
from jaxtron.optim.optimizer import find_factory
from jaxtron.optim.schedule import check_schedule
from jaxtron.parallel.pipeline.layout import place_layers
from jaxtron.parallel.pipeline.registry import find_schedule
from jaxtron.precision.checks import check_recipe

Axes = Mapping[str, int]


def validate(config: Config, num_devices: int) -> dict[str, int]:
    """Check the configuration for a job of ``num_devices`` devices.

    Returns:
        the size of each mesh axis.

    Raises:
        ConfigError: every problem found, one a line, each with what would be right.
    """
    problems = [problem for check in MODEL_CHECKS for problem in check(config)]
    axes: dict[str, int] = {}
    try:
        axes = resolve_axes(config.parallel, num_devices)
    except ConfigError as error:
        problems.append(str(error))
    else:
        problems += [problem for check in LAYOUT_CHECKS for problem in check(config, axes)]
    if problems:
        raise ConfigError("\n".join(problems))
    return axes


def validate_for_training(config: Config, num_devices: int) -> dict[str, int]:
    """:func:`validate`, and that this configuration can be trained here.

    Raises:
        ConfigError: as :func:`validate`; or layers cannot use a row of ``parallel.rules``, or the
            tokenizer does not fit the model.
    """
    axes = validate(config, num_devices)
    problems = [problem for check in TRAINING_CHECKS for problem in check(config, axes)]
    if problems:
        raise ConfigError("\n".join(problems))
    return axes


# Shape of the model.


def _heads_divide_hidden_size(config: Config) -> Iterator[str]:
    model = config.model
    derived = model.kv_channels is None and not model.multi_latent_attention
    if derived and model.hidden_size % model.num_attention_heads:
        yield (
            f"model.hidden_size {model.hidden_size} is not a multiple of "
            f"model.num_attention_heads {model.num_attention_heads}: set model.kv_channels to the "
            f"size of a head, or model.num_attention_heads to "
            f"{_or(_divisors_near(model.hidden_size, model.num_attention_heads))}"
        )


def _groups_divide_heads(config: Config) -> Iterator[str]:
    heads, groups = config.model.num_attention_heads, config.model.query_groups
    if heads % groups:
        yield (
            f"model.num_query_groups {groups} does not divide model.num_attention_heads {heads}: "
            f"set model.num_query_groups to {_or(_divisors_near(heads, groups))}"
        )


def _rotary_channels_are_pairs(config: Config) -> Iterator[str]:
    model = config.model
    if model.position_embedding_type != "rope":
        return
    rotated = model.rotary_channels
    if rotated % 2 or rotated == 0:
        yield (
            f"model.rotary_percent {model.rotary_percent} of {model.head_dim} channels a head is "
            f"{rotated:g}, but RoPE rotates pairs of channels: choose an even number of channels"
        )


def _rope_scaling_fits(config: Config) -> Iterator[str]:
    model = config.model
    if model.rope_scaling is None:
        return
    if model.position_embedding_type != "rope":
        yield (
            f"model.rope_scaling is set but model.position_embedding_type is "
            f"{model.position_embedding_type}: set model.rope_scaling to null"
        )
        return
    try:
        rope_scaling_parameters(model)
    except ConfigError as error:
        yield str(error)


def _sequence_fits_positions(config: Config) -> Iterator[str]:
    longest, seq_length = config.model.max_position_embeddings, config.data.seq_length
    if seq_length > longest:
        yield (
            f"data.seq_length {seq_length} is longer than model.max_position_embeddings {longest}: "
            f"set model.max_position_embeddings to {seq_length}, or data.seq_length to {longest} "
            "or less"
        )


def _eod_is_a_token(config: Config) -> Iterator[str]:
    eod, vocab_size = config.data.eod_token, config.model.vocab_size
    if eod is not None and eod >= vocab_size:
        yield (
            f"data.eod_token {eod} is not below model.vocab_size {vocab_size}: set data.eod_token "
            f"to an id from 0 to {vocab_size - 1}, or model.vocab_size to {eod + 1} or more"
        )


def _recompute_method_fits(config: Config) -> Iterator[str]:
    train, layers = config.train, config.model.num_layers
    method, count = train.recompute_method, train.recompute_num_layers
    if method is None and count is None:
        return
    if method is None:
        yield (
            f"train.recompute_num_layers is {count} but train.recompute_method is null: set "
            "train.recompute_method to uniform or block, or train.recompute_num_layers to null"
        )
    if count is None:
        yield (
            f"train.recompute_method is {method} but train.recompute_num_layers is null: set "
            f"train.recompute_num_layers to a number from 1 to {layers}, or "
            "train.recompute_method to null"
        )
    elif count > layers:
        yield (
            f"train.recompute_num_layers {count} is more than model.num_layers {layers}: set it to "
            f"{layers} or less"
        )
    if train.recompute != "full":
        yield (
            f"train.recompute_method and train.recompute_num_layers are forms of train.recompute: "
            f"full, but train.recompute is {train.recompute}: set train.recompute to full, or both "
            "to null"
        )


def _tokens_ahead_can_be_predicted(config: Config) -> Iterator[str]:
    model = config.model
    depths = model.mtp_num_layers
    if depths is None:
        if model.mtp_loss_scaling_factor != ModelConfig.mtp_loss_scaling_factor:
            yield (
                f"model.mtp_loss_scaling_factor is {model.mtp_loss_scaling_factor}, but "
                "model.mtp_num_layers is null: set model.mtp_num_layers, or leave the factor out"
            )
        return
    if model.position_embedding_type == "learned_absolute":
        yield (
            f"model.mtp_num_layers is {depths} and model.position_embedding_type is "
            "learned_absolute: the last position has no embedding further ahead; set "
            "model.position_embedding_type to rope, or model.mtp_num_layers to null"
        )
    if depths >= config.data.seq_length:
        yield (
            f"model.mtp_num_layers {depths} is not less than data.seq_length "
            f"{config.data.seq_length}: nothing is that far ahead; set it to "
            f"{config.data.seq_length - 1} or less"
        )


# The model on the mesh.


def _tensor_divides_heads(config: Config, axes: Axes) -> Iterator[str]:
    heads, tensor = config.model.num_attention_heads, axes["tensor"]
    if heads % tensor:
        yield (
            f"model.num_attention_heads {heads} is not a multiple of parallel.tensor {tensor}: "
            f"set parallel.tensor to {_tensor_sizes(axes, lambda t: heads % t == 0)}"
        )


def _tensor_fits_query_groups(config: Config, axes: Axes) -> Iterator[str]:
    groups, tensor = config.model.query_groups, axes["tensor"]
    if groups % tensor and tensor % groups:
        heads = config.model.num_attention_heads
        fitting = _tensor_sizes(
            axes, lambda t: heads % t == 0 and (groups % t == 0 or t % groups == 0)
        )
        yield (
            f"model.num_query_groups {groups} and parallel.tensor {tensor}: groups are split over "
            f"tensor, or repeated when tensor is a multiple of them, and here neither divides the "
            f"other: set parallel.tensor to {fitting}"
        )


def _tensor_divides_ffn(config: Config, axes: Axes) -> Iterator[str]:
    ffn, tensor = config.model.ffn_hidden_size, axes["tensor"]
    if ffn % tensor:
        yield (
            f"model.ffn_hidden_size {ffn} is not a multiple of parallel.tensor {tensor}: set "
            f"model.ffn_hidden_size to {_or(_multiples_near(ffn, tensor))}, or parallel.tensor to "
            f"{_tensor_sizes(axes, lambda t: ffn % t == 0)}"
        )


def _vocabulary_splits(config: Config, axes: Axes) -> Iterator[str]:
    model = config.model
    shards = axes["tensor"] * axes["pipeline"]
    if model.padded_vocab_size % shards:
        # The padding must not depend on the mesh, so it is the user's to choose once.
        fix = math.lcm(model.make_vocab_size_divisible_by, shards)
        yield (
            f"the vocabulary of {model.vocab_size} padded to {model.padded_vocab_size} "
            f"(model.make_vocab_size_divisible_by {model.make_vocab_size_divisible_by}) does not "
            f"split over parallel.tensor {axes['tensor']} × parallel.pipeline {axes['pipeline']} = "
            f"{shards}: set model.make_vocab_size_divisible_by to {fix}"
        )


def _sequence_parallel_has_tensor(config: Config, axes: Axes) -> Iterator[str]:
    if config.parallel.sequence_parallel and axes["tensor"] == 1:
        yield (
            "parallel.sequence_parallel is true but parallel.tensor is 1, so there is nothing to "
            "split the sequence over: set parallel.sequence_parallel to null (on when tensor > 1)"
        )


def _recompute_names_exist(config: Config, axes: Axes) -> Iterator[str]:
    recompute = config.train.recompute
    off = axes["tensor"] == 1 or config.parallel.sequence_parallel is False
    if isinstance(recompute, dict) and "gathered_sequence" in recompute and off:
        yield (
            "train.recompute lists gathered_sequence, which exists with sequence parallelism only: "
            "remove it, or set parallel.tensor above 1 with parallel.sequence_parallel null or true"
        )


def _sequence_splits(config: Config, axes: Axes) -> Iterator[str]:
    seq_length, context, tensor = config.data.seq_length, axes["context"], axes["tensor"]
    sequence_parallel = config.parallel.sequence_parallel is not False and tensor > 1
    # two chunks of the sequence on each member of context, their sum split over tensor
    needs, over = [1], []
    if context > 1:
        needs.append(2 * context)
        over.append(f"2 × parallel.context {context} (two chunks a device)")
    if sequence_parallel:
        needs.append(context * tensor)
        shown = f"parallel.context {context} × " if context > 1 else ""
        over.append(f"{shown}parallel.tensor {tensor} (sequence parallelism)")
    split = math.lcm(*needs)
    if seq_length % split:
        yield (
            f"data.seq_length {seq_length} is not a multiple of {' and of '.join(over)}: set "
            f"data.seq_length to {_or(_multiples_near(seq_length, split))}"
            + (", or parallel.sequence_parallel to false" if sequence_parallel else "")
        )


def _context_strategy_fits(config: Config, axes: Axes) -> Iterator[str]:
    parallel, context = config.parallel, axes["context"]
    strategy, exchanging = parallel.context_strategy, parallel.context_all_to_all
    if strategy != "hierarchical" and exchanging is not None:
        yield (
            f"parallel.context_all_to_all is {exchanging} but parallel.context_strategy is "
            f"{strategy}: set parallel.context_strategy to hierarchical, or "
            "parallel.context_all_to_all to null"
        )
        return
    if context == 1:
        return
    if axes["pipeline"] > 1 and strategy in ("ring", "hierarchical"):
        yield (
            f"parallel.context_strategy is {strategy} and parallel.pipeline is {axes['pipeline']}: "
            "a ring passes blocks by a collective-permute, which hangs on GPUs inside the branches "
            "of a pipeline stage: set parallel.context_strategy to all_gather or all_to_all, or "
            "parallel.pipeline to 1"
        )
    heads, groups = _attention_heads_per_device(config, axes)
    fitting = [d for d in _divisors(context) if heads % d == 0 and groups % d == 0]
    have = f"{heads} query heads and {groups} key/value groups"
    if strategy == "hierarchical":
        inner = [d for d in fitting if 1 < d < context]
        choices = f"parallel.context_all_to_all to {_or(inner)}" if inner else ""
        other = "parallel.context_strategy to ring or all_gather"
        fix = f"{choices}, or {other}" if inner else other
        if exchanging is None:
            yield (
                "parallel.context_strategy is hierarchical, but parallel.context_all_to_all is "
                f"null: it must say how many members exchange heads; set {fix}"
            )
        elif context % exchanging or exchanging == context:
            yield (
                f"parallel.context_all_to_all {exchanging} does not cut parallel.context {context} "
                f"in two or more groups: set {fix}"
            )
        elif exchanging not in fitting:
            yield (
                f"parallel.context_all_to_all {exchanging} does not divide the {have} that a "
                f"device has after parallel.tensor {axes['tensor']}: set {fix}"
            )
    elif strategy == "all_to_all" and context not in fitting:
        inner = [d for d in fitting if 1 < d < context]
        hierarchical = (
            f", or parallel.context_strategy to hierarchical with parallel.context_all_to_all "
            f"{_or(inner)}"
            if inner
            else ""
        )
        yield (
            f"parallel.context_strategy is all_to_all, but parallel.context {context} does not "
            f"divide the {have} that a device has after parallel.tensor {axes['tensor']}: set "
            f"parallel.context_strategy to all_gather or ring{hierarchical}"
        )


def _attention_heads_per_device(config: Config, axes: Axes) -> tuple[int, int]:
    """Query heads and key/value heads of one device, as the rules of the logical axes split them.

    The sizes alone are looked at; rules that do not fit are reported elsewhere.
    """
    heads, groups = config.model.num_attention_heads, config.model.query_groups
    try:
        split = make_rules(config.parallel.rules, axes).size("heads")
    except ConfigError:
        split = axes["tensor"]
    return max(1, heads // split), max(1, groups // split)


def _batch_divides(config: Config, axes: Axes) -> Iterator[str]:
    try:
        batch_layout(config, axes)
    except ConfigError as error:
        yield str(error)


def _layers_fit_stages(config: Config, axes: Axes) -> Iterator[str]:
    parallel, stages = config.parallel, axes["pipeline"]
    chunks = parallel.virtual_pipeline
    if chunks < 1:
        yield f"parallel.virtual_pipeline is {chunks}: a stage has 1 chunk of layers or more"
    elif stages == 1 and chunks > 1:
        yield (
            f"parallel.virtual_pipeline is {chunks} but parallel.pipeline is 1, so there are no "
            "stages to interleave: set parallel.virtual_pipeline to 1, or parallel.pipeline to 2 "
            "or more"
        )
    else:
        try:
            place_layers(config.model.num_layers, stages, chunks, parallel.pipeline_layout)
        except ConfigError as error:
            yield str(error)


def _schedule_runs_microbatches(config: Config, axes: Axes) -> Iterator[str]:
    parallel, stages = config.parallel, axes["pipeline"]
    chunks = parallel.virtual_pipeline
    if chunks < 1 or (stages == 1 and chunks > 1):
        return  # reported with the layers
    try:
        microbatches = batch_layout(config, axes).num_microbatches
    except ConfigError:
        return  # reported with the batch
    try:
        # One stage alone runs any number of microbatches one after the other.
        schedule = find_schedule(parallel.pipeline_schedule)
        schedule(stages, chunks, microbatches if stages > 1 else 1)
    except ConfigError as error:
        yield str(error)


def _fp8_fits(config: Config, axes: Axes) -> Iterator[str]:
    yield from check_recipe(
        config.precision, config.model.num_layers, config.train.layer_loop, axes
    )


def _ramp_runs_alone(config: Config, axes: Axes) -> Iterator[str]:
    if config.train.rampup_batch_size is not None and axes["pipeline"] > 1:
        yield (
            f"train.rampup_batch_size is {config.train.rampup_batch_size} but parallel.pipeline is "
            f"{axes['pipeline']}: a pipeline schedule is made for one number of microbatches; set "
            "parallel.pipeline to 1, or train.rampup_batch_size to null"
        )


def _offload_runs_alone(config: Config, axes: Axes) -> Iterator[str]:
    if config.optimizer.offload and axes["pipeline"] > 1:
        yield (
            f"optimizer.offload is true but parallel.pipeline is {axes['pipeline']}: moments of a "
            "pipeline are put in another order for every save, which needs them on the devices; "
            "set optimizer.offload to false, or parallel.pipeline to 1"
        )


# What only training needs.


def _pipeline_keeps_weights(config: Config, axes: Axes) -> Iterator[str]:
    if axes["pipeline"] > 1 and config.parallel.data_sharding == "optim_grads_params":
        yield (
            "parallel.data_sharding is optim_grads_params and parallel.pipeline is "
            f"{axes['pipeline']}: a stage uses its weights in every tick, so they would be "
            "gathered anew for every microbatch; set parallel.data_sharding to optim_grads (a "
            "stage then holds a bf16 copy of its own layers alone), or parallel.pipeline to 1"
        )


def _layers_can_use_rules(config: Config, axes: Axes) -> Iterator[str]:
    try:
        rules = make_rules(config.parallel.rules, axes)
    except ConfigError as error:
        yield str(error)
    else:
        yield from check_layers(rules)


def _tokenizer_fits_vocabulary(config: Config, axes: Axes) -> Iterator[str]:
    if config.data.tokenizer is None:
        return
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except JaxtronError as error:
        yield f"data.tokenizer: {error}"
        return
    if tokenizer.vocab_size > config.model.vocab_size:
        yield (
            f"the tokenizer {config.data.tokenizer} has {tokenizer.vocab_size} tokens, but "
            f"model.vocab_size is {config.model.vocab_size}: set model.vocab_size to "
            f"{tokenizer.vocab_size}"
        )


def _optimizer_can_be_built(config: Config, axes: Axes) -> Iterator[str]:
    try:
        find_factory(config.optimizer)
    except ConfigError as error:
        yield str(error)
    try:
        total = batch_schedule(config.train).plan_length(config.train.steps)
        check_schedule(config.optimizer, total_steps=total)
    except ConfigError as error:
        yield str(error)


MODEL_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _heads_divide_hidden_size,
    _groups_divide_heads,
    _rotary_channels_are_pairs,
    _rope_scaling_fits,
    _sequence_fits_positions,
    _eod_is_a_token,
    _recompute_method_fits,
    _tokens_ahead_can_be_predicted,
    *MOE_MODEL_CHECKS,
)
"""Checks that hold on any mesh; each yields ``what is wrong: what would be right``."""

LAYOUT_CHECKS: tuple[Callable[[Config, Axes], Iterator[str]], ...] = (
    _tensor_divides_heads,
    _tensor_fits_query_groups,
    _tensor_divides_ffn,
    _vocabulary_splits,
    _sequence_parallel_has_tensor,
    _sequence_splits,
    _context_strategy_fits,
    _recompute_names_exist,
    _batch_divides,
    _layers_fit_stages,
    _schedule_runs_microbatches,
    *MOE_LAYOUT_CHECKS,
    *DYNAMIC_CONTEXT_CHECKS,
)
"""Checks of the model, the sequence and the batch against the sizes of the mesh axes."""

TRAINING_CHECKS: tuple[Callable[[Config, Axes], Iterator[str]], ...] = (
    _ramp_runs_alone,
    _offload_runs_alone,
    _pipeline_keeps_weights,
    _layers_can_use_rules,
    _tokenizer_fits_vocabulary,
    _optimizer_can_be_built,
    _fp8_fits,
)
"""Checks of a training run alone."""


def _tensor_sizes(axes: Axes, fits: Callable[[int], bool]) -> str:
    """The nearest sizes of `tensor` that fit and divide the devices of the job."""
    devices = math.prod(axes.values())
    return _or(_near([t for t in _divisors(devices) if fits(t)], axes["tensor"]))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _near(choices: list[int], value: int) -> list[int]:
    """The nearest choice below and above a value."""
    below = [choice for choice in choices if choice < value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return below + above


def _divisors_near(number: int, value: int) -> list[int]:
    return _near(_divisors(number), value)


def _multiples_near(number: int, factor: int) -> list[int]:
    below = number // factor * factor
    return [multiple for multiple in (below, below + factor) if multiple]


def _or(choices: list[int]) -> str:
    return " or ".join(map(str, choices))
