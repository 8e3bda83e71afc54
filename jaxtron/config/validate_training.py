"""What a training run needs besides a model that fits its mesh."""

from collections.abc import Callable, Iterator, Mapping

from jaxtron.config.batch_schedule import batch_schedule
from jaxtron.config.config import Config
from jaxtron.data.tokenizers import load_tokenizer
from jaxtron.errors import ConfigError, JaxtronError
from jaxtron.mesh.rules import check_layers, make_rules
from jaxtron.optim.optimizer import find_factory
from jaxtron.optim.schedule import check_schedule
from jaxtron.parallel.overlap import plan_overlap
from jaxtron.precision.checks import check_recipe

Axes = Mapping[str, int]


def _fp8_fits(config: Config, axes: Axes) -> Iterator[str]:
    yield from check_recipe(
        config.precision, config.model.num_layers, config.train.layer_loop, axes
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


def _experts_can_be_copies(config: Config, axes: Axes) -> Iterator[str]:
    model = config.model
    if config.checkpoint.moe_use_upcycling and model.expert_ffn != model.ffn_hidden_size:
        yield (
            "checkpoint.moe_use_upcycling copies whole MLPs, but model.moe_ffn_hidden_size is "
            f"{model.expert_ffn} and model.ffn_hidden_size {model.ffn_hidden_size}: set "
            "model.moe_ffn_hidden_size to null"
        )


def _profiled_steps_are_run(config: Config, axes: Axes) -> Iterator[str]:
    profiled, steps = config.observe.profile_steps, config.train.steps
    if profiled is not None and profiled[0] > steps:
        yield (
            f"observe.profile_steps is {list(profiled)}, but the run ends after step {steps} "
            "(train.steps), before the first of them: choose earlier steps, or set "
            "observe.profile_steps to null"
        )


def _overlap_can_act(config: Config, axes: Axes) -> Iterator[str]:
    try:
        plan_overlap(config.parallel, axes, unroll=True, platform="cpu")
    except ConfigError as error:
        yield str(error)


TRAINING_CHECKS: tuple[Callable[[Config, Axes], Iterator[str]], ...] = (
    _pipeline_keeps_weights,
    _layers_can_use_rules,
    _experts_can_be_copies,
    _overlap_can_act,
    _tokenizer_fits_vocabulary,
    _profiled_steps_are_run,
    _optimizer_can_be_built,
    _fp8_fits,
)
"""Checks of a training run alone."""
