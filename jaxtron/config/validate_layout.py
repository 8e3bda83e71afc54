"""What the model, the sequence and the batch must keep to on the sizes of the mesh axes."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping

from jaxtron.config.batch import batch_layout
from jaxtron.config.batch_schedule import batch_schedule
from jaxtron.config.choices import divisors, either, multiples_near, tensor_sizes
from jaxtron.config.config import Config
from jaxtron.config.yaml_io import spelled
from jaxtron.errors import ConfigError
from jaxtron.mesh.rules import LogicalRules, check_layers, make_rules
from jaxtron.parallel.pipeline.layout import place_layers
from jaxtron.parallel.pipeline.registry import make_schedule
from jaxtron.parallel.pipeline.table import programs

Axes = Mapping[str, int]


def _rules(config: Config, axes: Axes) -> LogicalRules:
    """The rules of the logical axes; the default ones for such as are refused elsewhere."""
    default = make_rules({}, axes)
    try:
        rules = make_rules(config.parallel.rules, axes)
    except ConfigError:
        return default
    return default if any(check_layers(rules)) else rules


def _tensor_divides_heads(config: Config, axes: Axes) -> Iterator[str]:
    heads = config.model.num_attention_heads
    if heads % _rules(config, axes).size("heads"):
        yield (
            f"model.num_attention_heads {heads} is not a multiple of parallel.tensor "
            f"{axes['tensor']}: "
            f"set parallel.tensor to {tensor_sizes(axes, lambda t: heads % t == 0)}"
        )


def _tensor_fits_query_groups(config: Config, axes: Axes) -> Iterator[str]:
    groups, tensor = config.model.num_query_groups, _rules(config, axes).size("heads")
    if groups is None:
        return  # as many as heads
    if groups % tensor and tensor % groups:
        heads = config.model.num_attention_heads
        fitting = tensor_sizes(
            axes, lambda t: heads % t == 0 and (groups % t == 0 or t % groups == 0)
        )
        yield (
            f"model.num_query_groups {groups} and parallel.tensor {tensor}: groups are split over "
            f"tensor, or repeated when tensor is a multiple of them, and here neither divides the "
            f"other: set parallel.tensor to {fitting}"
        )


def _tensor_divides_ffn(config: Config, axes: Axes) -> Iterator[str]:
    model, tensor = config.model, axes["tensor"]
    if model.num_experts is not None and all(model.layer_pattern):
        return  # no layer has an MLP of this width
    ffn = model.ffn_hidden_size
    if ffn % _rules(config, axes).size("mlp"):
        yield (
            f"model.ffn_hidden_size {ffn} is not a multiple of parallel.tensor {tensor}: set "
            f"model.ffn_hidden_size to {either(multiples_near(ffn, tensor))}, or parallel.tensor "
            f"to {tensor_sizes(axes, lambda t: ffn % t == 0)}"
        )


def _vocabulary_splits(config: Config, axes: Axes) -> Iterator[str]:
    model, rules = config.model, _rules(config, axes)
    shards = rules.size("vocab")
    if model.padded_vocab_size % shards:
        # The padding must not depend on the mesh, so it is the user's to choose once.
        fix = math.lcm(model.make_vocab_size_divisible_by, shards)
        over = " × ".join(f"parallel.{axis} {axes[axis]}" for axis in reversed(rules.axes("vocab")))
        product = f" = {shards}" if " × " in over else ""
        yield (
            f"the vocabulary of {model.vocab_size} padded to {model.padded_vocab_size} "
            f"(model.make_vocab_size_divisible_by {model.make_vocab_size_divisible_by}) does not "
            f"split over {over}{product}: set model.make_vocab_size_divisible_by to {fix}"
        )


def _sequence_parallel_has_tensor(config: Config, axes: Axes) -> Iterator[str]:
    if config.parallel.sequence_parallel and axes["tensor"] == 1:
        yield (
            "parallel.sequence_parallel is true but parallel.tensor is 1, so there is nothing to "
            "split the sequence over: set parallel.sequence_parallel to null (on when tensor > 1)"
        )


def _blocks_can_work_on_parts(config: Config, axes: Axes) -> Iterator[str]:
    parallel = config.parallel
    if not parallel.tp_comm_overlap:
        return
    fix = "set parallel.tp_comm_overlap to null or false"
    if axes["tensor"] == 1 or parallel.sequence_parallel is False:
        yield (
            "parallel.tp_comm_overlap is true, but without sequence parallelism the residual "
            f"stream is not split: {fix}, or parallel.tensor above 1 with "
            "parallel.sequence_parallel null or true"
        )
    if _stages_branch(config, axes):
        yield (
            "parallel.tp_comm_overlap is true, but with several chunks of layers a stage, or "
            f"uneven stages, the {axes['pipeline']} stages of parallel.pipeline branch, and "
            f"permutations in branches wait for ever on GPUs: {fix}"
        )


def _stages_branch(config: Config, axes: Axes) -> bool:
    """Whether stages compute different stretches of their layers at a time."""
    parallel, model = config.parallel, config.model
    try:
        placement = place_layers(
            model.stacked_blocks,
            axes["pipeline"],
            parallel.virtual_pipeline,
            parallel.pipeline_layout,
        )
    except ConfigError:
        return False  # reported with the layers
    return len(programs(placement).stretches) > 1


def _recompute_names_exist(config: Config, axes: Axes) -> Iterator[str]:
    recompute = config.train.recompute
    off = axes["tensor"] == 1 or config.parallel.sequence_parallel is False
    if isinstance(recompute, dict) and "gathered_sequence" in recompute and off:
        yield (
            "train.recompute lists gathered_sequence, which exists with sequence parallelism only: "
            "remove it, or set parallel.tensor above 1 with parallel.sequence_parallel null or true"
        )


def _pipeline_keeps_activations(config: Config, axes: Axes) -> Iterator[str]:
    recompute = config.train.recompute
    if axes["pipeline"] == 1 or not isinstance(recompute, dict):
        return
    offloaded = [name for name, action in recompute.items() if action == "offload"]
    if offloaded:
        yield (
            f"train.recompute offloads {', '.join(offloaded)} and parallel.pipeline is "
            f"{axes['pipeline']}: what a stage keeps for its backward passes lies in a ring buffer "
            "on its device; set "
            f"{' and '.join(f'train.recompute.{name}' for name in offloaded)} to recompute, or "
            "parallel.pipeline to 1"
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
            f"data.seq_length to {either(multiples_near(seq_length, split))}"
            + (", or parallel.sequence_parallel to false" if sequence_parallel else "")
        )


def _context_strategy_fits(config: Config, axes: Axes) -> Iterator[str]:
    parallel, context = config.parallel, axes["context"]
    strategy, exchanging = parallel.context_strategy, parallel.context_all_to_all
    if context == 1:
        return
    if axes["pipeline"] > 1 and strategy in ("ring", "hierarchical"):
        yield (
            f"parallel.context_strategy is {strategy} and parallel.pipeline is {axes['pipeline']}: "
            "a ring passes blocks by a collective-permute, which on GPUs waits for ever where "
            "stages branch (several chunks, or uneven stages) and has not been run on them without "
            "branches: set parallel.context_strategy to all_gather or all_to_all, or "
            "parallel.pipeline to 1"
        )
    heads, groups = _attention_heads_per_device(config, axes)
    fitting = [d for d in divisors(context) if heads % d == 0 and groups % d == 0]
    have = f"{heads} query heads and {groups} key/value groups"
    if strategy == "hierarchical":
        inner = [d for d in fitting if 1 < d < context]
        choices = f"parallel.context_all_to_all to {either(inner)}" if inner else ""
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
            f"{either(inner)}"
            if inner
            else ""
        )
        yield (
            f"parallel.context_strategy is all_to_all, but parallel.context {context} does not "
            f"divide the {have} that a device has after parallel.tensor {axes['tensor']}: set "
            f"parallel.context_strategy to all_gather or ring{hierarchical}"
        )


def _documents_can_be_cut(config: Config, axes: Axes) -> Iterator[str]:
    parallel, model, data = config.parallel, config.model, config.data
    if parallel.context_cut_documents is None or axes["context"] == 1:
        return
    shown = f"parallel.context_cut_documents is {parallel.context_cut_documents}"
    without = "or parallel.context_cut_documents to null"
    if parallel.context_strategy == "all_to_all":
        yield (
            f"{shown} and parallel.context_strategy is all_to_all, where every device computes "
            "whole rows and there is nothing to balance: set parallel.context_cut_documents to "
            "null, or parallel.context_strategy to ring, all_gather or hierarchical"
        )
    off = [k for k in ("reset_attention_mask", "reset_position_ids") if not getattr(data, k)]
    if off:
        yield (
            f"{shown}, but documents of a row see each other or know their place in it: set "
            f"{' and '.join(f'data.{name}' for name in off)} to true, {without}"
        )
    if parallel.context_cut_documents > data.seq_length:
        yield (
            f"{shown}, but no document is longer than data.seq_length {data.seq_length}, so none "
            f"would be cut: set parallel.context_cut_documents to {data.seq_length // 4 or 1}, "
            f"say, {without}"
        )
    for name, off_value in (
        ("window_size", None),
        ("mtp_num_layers", None),
        ("moe_expert_capacity_factor", None),
        ("attention_dropout", 0),
        ("hidden_dropout", 0),
        ("moe_input_jitter_eps", None),
        ("moe_router_force_load_balancing", False),
    ):
        value = getattr(model, name)
        if value is not None and value != off_value:
            yield (
                f"{shown} and model.{name} is {spelled(value)}, which goes by a token's place in "
                f"the row, and cut documents change it: set model.{name} to {spelled(off_value)}, "
                f"{without}"
            )


def _attention_heads_per_device(config: Config, axes: Axes) -> tuple[int, int]:
    """Query heads and key/value heads of one device."""
    heads, groups = config.model.num_attention_heads, config.model.query_groups
    split = _rules(config, axes).size("heads")
    return max(1, heads // split), max(1, groups // split)


def _batch_divides(config: Config, axes: Axes) -> Iterator[str]:
    try:
        batch_layout(config, axes)
    except ConfigError as error:
        yield str(error)


def _microbatches_at_once_exist(config: Config, axes: Axes) -> Iterator[str]:
    together = config.train.microbatches_at_once
    if together == 1:
        return
    if axes["pipeline"] > 1:
        yield (
            f"train.microbatches_at_once is {together}, but with parallel.pipeline "
            f"{axes['pipeline']} the schedule says which microbatches are computed beside each "
            "other: set train.microbatches_at_once to 1"
        )
    if config.parallel.dynamic_context:
        return  # the scheduler makes the microbatches
    try:
        count = batch_layout(config, axes).num_microbatches
    except ConfigError:
        return  # reported with the batch
    if count < together:
        yield (
            f"train.microbatches_at_once is {together}, but a step has {count} "
            f"microbatch{'es' if count > 1 else ''}: make train.micro_batch_size smaller, or set "
            f"train.microbatches_at_once to {count}"
        )


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
        dense, size = config.model.num_dense_layers, len(config.model.layer_block)
        try:
            place_layers(
                config.model.stacked_blocks,
                stages,
                chunks,
                parallel.pipeline_layout,
                before=dense,
                block=size,
            )
        except ConfigError as error:
            notes = []
            if dense:
                notes.append(
                    f"the first {dense} layers, dense by model.moe_layer_freq, belong to the "
                    "embedding and do not count here"
                )
            if size > 1:
                notes.append(
                    f"what counts here are blocks of {size} layers, which model.moe_layer_freq "
                    "repeats: a pipeline cuts between blocks"
                )
            yield str(error) + "".join(f" ({note})" for note in notes)


def _schedule_runs_microbatches(config: Config, axes: Axes) -> Iterator[str]:
    parallel, stages = config.parallel, axes["pipeline"]
    chunks = parallel.virtual_pipeline
    if chunks < 1 or (stages == 1 and chunks > 1):
        return  # reported with the layers
    try:
        batch = batch_layout(config, axes)
    except ConfigError:
        return  # reported with the batch
    try:
        # One stage alone runs any number of microbatches one after the other.
        schedule = functools.partial(make_schedule, parallel.pipeline_schedule, stages, chunks)
        schedule(batch.num_microbatches if stages > 1 else 1)
    except ConfigError as error:
        yield str(error)
        return
    for growing in batch_schedule(config.train).stages[:-1] if stages > 1 else ():
        try:
            schedule(growing.size // batch.rows_per_microbatch)
        except ConfigError as error:
            yield f"train.rampup_batch_size, at a batch of {growing.size}: {error}"
            return


AXES_CHECKS: tuple[Callable[[Config, Axes], Iterator[str]], ...] = (
    _tensor_divides_heads,
    _tensor_fits_query_groups,
    _tensor_divides_ffn,
    _vocabulary_splits,
    _sequence_parallel_has_tensor,
    _blocks_can_work_on_parts,
    _sequence_splits,
    _context_strategy_fits,
    _documents_can_be_cut,
    _recompute_names_exist,
    _pipeline_keeps_activations,
    _batch_divides,
    _microbatches_at_once_exist,
    _layers_fit_stages,
    _schedule_runs_microbatches,
)
"""Checks of the model, the sequence and the batch against the sizes of the mesh axes."""
