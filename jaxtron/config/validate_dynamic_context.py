"""Combinations with ``parallel.dynamic_context`` that cannot work, each with its fix."""

import math
from collections.abc import Callable, Iterator, Mapping

from jaxtron.config.config import Config
from jaxtron.errors import ConfigError
from jaxtron.parallel.context.dynamic import LARGEST_MENU, dynamic_context, tokens_per_device

Axes = Mapping[str, int]


def _axes_fit(config: Config, axes: Axes) -> Iterator[str]:
    parallel, context = config.parallel, axes["context"]
    if not parallel.dynamic_context:
        return
    if axes["pipeline"] > 1:
        yield (
            f"parallel.dynamic_context is true and parallel.pipeline is {axes['pipeline']}: a "
            "pipeline's schedule is made for one number of microbatches of one shape, which here "
            "change in every step: set parallel.pipeline to 1, or parallel.dynamic_context to false"
        )
    if config.model.mtp_num_layers is not None:
        yield (
            f"parallel.dynamic_context is true and model.mtp_num_layers is "
            f"{config.model.mtp_num_layers}: the parts of a step do not know how many targets "
            "further ahead the whole step has; set model.mtp_num_layers to null, or "
            "parallel.dynamic_context to false"
        )
    if config.model.moe_router_load_balancing_type == "global_aux_loss":
        yield (
            "parallel.dynamic_context is true and model.moe_router_load_balancing_type is "
            "global_aux_loss: loads are not carried from one part of a step to the next; set the "
            "type to aux_loss (over a microbatch) or none, or parallel.dynamic_context to false"
        )
    if context == 1:
        yield (
            "parallel.dynamic_context is true but parallel.context is 1, so there is no degree to "
            "choose: set parallel.context to 2 or more, or parallel.dynamic_context to false"
        )
        return
    try:
        stage = dynamic_context(config, axes)
    except ConfigError as error:
        yield f"parallel.dynamic_context: {error}"
        return
    least = parallel.min_dynamic_context
    if stage is None or not stage.menu:
        yield (
            f"parallel.min_dynamic_context is {least}, more than parallel.context {context}: set "
            f"it to {context} or less"
        )
    elif len(stage.menu) > LARGEST_MENU:
        yield (
            f"parallel.dynamic_context would compile {len(stage.menu)} context degrees, {least} to "
            f"{context}, and at most {LARGEST_MENU} are allowed: set parallel.min_dynamic_context "
            f"to {context >> (LARGEST_MENU - 1)}"
        )


def _rows_fit(config: Config, axes: Axes) -> Iterator[str]:
    parallel, context, tensor = config.parallel, axes["context"], axes["tensor"]
    if not parallel.dynamic_context or context == 1:
        return
    own = tokens_per_device(config, context)
    sequence_parallel = parallel.sequence_parallel is not False and tensor > 1
    split = math.lcm(2, tensor if sequence_parallel else 1)
    if own % split:
        yield (
            f"a device has {own} tokens of a row (parallel.max_seqlen_per_dp_cp_rank, by default "
            f"data.seq_length / parallel.context), which {split} must divide (two chunks"
            + (f", parallel.tensor {tensor} with sequence parallelism" if sequence_parallel else "")
            + f"): set parallel.max_seqlen_per_dp_cp_rank to {-(-own // split) * split}"
        )
    whole = config.data.seq_length * config.train.global_batch_size
    if own > whole:
        yield (
            f"parallel.max_seqlen_per_dp_cp_rank is {own}, more than the {whole} tokens of a step "
            f"(train.global_batch_size × data.seq_length): set it to {whole} or less"
        )
    if own * context < config.data.seq_length:
        yield (
            f"parallel.max_seqlen_per_dp_cp_rank {own} × parallel.context {context} = "
            f"{own * context}, but a document may have data.seq_length {config.data.seq_length} "
            f"tokens: set parallel.max_seqlen_per_dp_cp_rank to "
            f"{-(-config.data.seq_length // context)} or more"
        )


def _documents_can_move(config: Config, axes: Axes) -> Iterator[str]:
    if not config.parallel.dynamic_context:
        return
    data, train, model = config.data, config.train, config.model
    off = [k for k in ("reset_attention_mask", "reset_position_ids") if not getattr(data, k)]
    if off:
        yield (
            "parallel.dynamic_context moves documents between rows, so they may not see each other "
            f"nor know their place: set {' and '.join(f'data.{name}' for name in off)} to true"
        )
    if config.loss.reduction != "token":
        yield (
            f"loss.reduction is {config.loss.reduction}, but under parallel.dynamic_context the "
            "scheduler makes the microbatches, so that a mean over them has no meaning: set "
            "loss.reduction to token"
        )
    for name, value in (
        ("micro_batch_size", train.micro_batch_size),
        ("num_microbatches", train.num_microbatches),
    ):
        if value is not None:
            yield (
                f"train.{name} is {value}, but under parallel.dynamic_context the scheduler makes "
                f"the microbatches: leave train.{name} out (parallel.max_seqlen_per_dp_cp_rank "
                "says how many tokens a device takes at a time)"
            )
    if model.num_experts is None:
        return
    kind = model.moe_router_load_balancing_type
    by_row = kind == "sinkhorn" or (kind == "seq_aux_loss" and model.moe_aux_loss_coeff > 0)
    if by_row:
        yield (
            f"model.moe_router_load_balancing_type is {kind}, which balances each row, but under "
            "parallel.dynamic_context a row is what the scheduler packed: set it to aux_loss "
            "(over a microbatch) or none"
        )
    if model.moe_expert_capacity_factor is not None:
        yield (
            f"model.moe_expert_capacity_factor is {model.moe_expert_capacity_factor}, a limit for "
            "each row, but under parallel.dynamic_context a row is what the scheduler packed: set "
            "it to null"
        )


DYNAMIC_CONTEXT_CHECKS: tuple[Callable[[Config, Axes], Iterator[str]], ...] = (
    _axes_fit,
    _rows_fit,
    _documents_can_move,
)
