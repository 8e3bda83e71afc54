"""Combinations that cannot work are refused with the fix; those that can are left alone.

Every fix named in a message is applied and must make the configuration valid.
"""

import pytest

from jaxtron.config.load import load_config
from jaxtron.config.presets import preset_names
from jaxtron.config.validate import validate, validate_for_training
from jaxtron.errors import ConfigError

# tiny: 4 layers, hidden 64, 8 heads in 2 groups, ffn 128, vocabulary 257, sequence 64, 8 rows.
BASE = {"preset": "tiny"}

DYNAMIC = ["parallel.dynamic_context=true", "data.eod_token=0"] + [
    f"data.{name}=true" for name in ("reset_attention_mask", "reset_position_ids")
]

# documents of 16 tokens or more are cut by themselves
CUT = [*DYNAMIC[1:], "parallel.context=2", "parallel.context_cut_documents=16"]

# (overrides, devices, words of the message, overrides that fix it)
REFUSED = {
    "more_microbatches_at_once_than_there_are": (
        ["train.num_microbatches=1", "train.microbatches_at_once=2"],
        8,
        ["train.microbatches_at_once is 2", "a step has 1 microbatch:"],
        ["train.microbatches_at_once=1"],
    ),
    "microbatches_at_once_on_a_pipeline": (
        ["parallel.pipeline=2", "train.num_microbatches=4", "train.microbatches_at_once=2"],
        2,
        ["train.microbatches_at_once is 2", "parallel.pipeline 2"],
        ["train.microbatches_at_once=1"],
    ),
    "offloaded_activations_on_a_pipeline": (
        ["parallel.pipeline=2", "train.recompute={qkv: offload, mlp_up: recompute}"],
        2,
        ["train.recompute offloads qkv", "parallel.pipeline is 2", "train.recompute.qkv"],
        ["train.recompute.qkv=recompute"],
    ),
    "dynamic_context_on_a_pipeline": (
        [*DYNAMIC, "parallel.context=2", "parallel.pipeline=2"],
        8,
        ["parallel.dynamic_context", "parallel.pipeline is 2"],
        ["parallel.pipeline=1"],
    ),
    "dynamic_context_of_one_device": (
        [*DYNAMIC, "parallel.context=1"],
        8,
        ["parallel.dynamic_context", "parallel.context is 1"],
        ["parallel.context=2"],
    ),
    "dynamic_context_of_documents_that_see_each_other": (
        [*DYNAMIC, "parallel.context=2", "data.reset_attention_mask=false"],
        8,
        ["parallel.dynamic_context", "data.reset_attention_mask to true"],
        ["data.reset_attention_mask=true"],
    ),
    "dynamic_context_with_the_mean_of_microbatches": (
        [*DYNAMIC, "parallel.context=2", "loss.reduction=microbatch"],
        8,
        ["loss.reduction is microbatch", "parallel.dynamic_context"],
        ["loss.reduction=token"],
    ),
    "dynamic_context_with_microbatches_of_another_kind": (
        [*DYNAMIC, "parallel.context=2", "train.num_microbatches=2"],
        8,
        ["train.num_microbatches is 2", "parallel.max_seqlen_per_dp_cp_rank"],
        ["train.num_microbatches=null"],
    ),
    "dynamic_context_with_rows_shorter_than_a_document": (
        [*DYNAMIC, "parallel.context=2", "parallel.max_seqlen_per_dp_cp_rank=30"],
        8,
        ["30 × parallel.context 2 = 60", "data.seq_length 64", "to 32 or more"],
        ["parallel.max_seqlen_per_dp_cp_rank=32"],
    ),
    "dynamic_context_with_an_odd_share": (
        [*DYNAMIC, "parallel.context=2", "parallel.max_seqlen_per_dp_cp_rank=33"],
        8,
        ["33 tokens of a row", "which 2 must divide", "max_seqlen_per_dp_cp_rank to 34"],
        ["parallel.max_seqlen_per_dp_cp_rank=34"],
    ),
    "dynamic_context_with_a_share_that_sequence_parallelism_cannot_split": (
        [*DYNAMIC, "parallel.context=2", "parallel.tensor=4"]
        + ["model.num_query_groups=4", "parallel.max_seqlen_per_dp_cp_rank=34"],
        8,
        ["34 tokens of a row", "which 4 must divide", "parallel.tensor 4 with sequence"],
        ["parallel.sequence_parallel=false"],
    ),
    "dynamic_context_with_too_high_a_least_degree": (
        [*DYNAMIC, "parallel.context=2", "parallel.min_dynamic_context=4"],
        8,
        ["parallel.min_dynamic_context is 4", "parallel.context 2", "2 or less"],
        ["parallel.min_dynamic_context=2"],
    ),
    "dynamic_context_with_more_tokens_than_a_step_has": (
        [*DYNAMIC, "parallel.context=2", "parallel.max_seqlen_per_dp_cp_rank=514"],
        8,
        ["max_seqlen_per_dp_cp_rank is 514", "the 512 tokens of a step", "512 or less"],
        ["parallel.max_seqlen_per_dp_cp_rank=512"],
    ),
    "dynamic_context_of_degrees_that_are_no_powers_of_two": (
        [*DYNAMIC, "parallel.context=6", "parallel.fsdp=1", "data.seq_length=48"],
        6,
        ["powers of two", "parallel.context is 6", "4 or 8", "parallel.dynamic_context to false"],
        ["parallel.dynamic_context=false"],
    ),
    "a_least_degree_that_nothing_reads": (
        ["parallel.min_dynamic_context=2"],
        8,
        ["parallel.min_dynamic_context is 2", "parallel.dynamic_context is false"],
        ["parallel.min_dynamic_context=1"],
    ),
    "heads_not_a_multiple_of_tensor": (
        ["model.num_attention_heads=12", "model.kv_channels=8", "model.num_query_groups=null"]
        + ["parallel.tensor=8"],
        8,
        ["model.num_attention_heads 12", "parallel.tensor 8", "parallel.tensor to 4"],
        ["parallel.tensor=4"],
    ),
    "groups_and_tensor_do_not_divide_each_other": (
        ["model.num_attention_heads=12", "model.kv_channels=8", "model.num_query_groups=6"]
        + ["parallel.tensor=4"],
        8,
        [
            "model.num_query_groups 6",
            "parallel.tensor 4",
            "neither divides",
            "parallel.tensor to 2",
        ],
        ["parallel.tensor=2"],
    ),
    "groups_do_not_divide_heads": (
        ["model.num_query_groups=3"],
        8,
        ["model.num_query_groups 3", "model.num_attention_heads 8", "2 or 4"],
        ["model.num_query_groups=4"],
    ),
    "heads_do_not_divide_hidden_size": (
        ["model.num_attention_heads=12"],
        8,
        ["model.hidden_size 64", "model.num_attention_heads 12", "8 or 16", "kv_channels"],
        ["model.num_attention_heads=16"],
    ),
    "odd_rotary_channels": (
        ["model.kv_channels=7"],
        8,
        ["7 channels", "even"],
        ["model.kv_channels=8"],
    ),
    "rope_scaling_without_rope": (
        ["model.position_embedding_type=none", "model.rope_scaling={type: linear, factor: 2.0}"],
        8,
        ["model.rope_scaling", "model.position_embedding_type is none"],
        ["model.rope_scaling=null"],
    ),
    "rope_scaling_of_an_unknown_type": (
        ["model.rope_scaling={type: magic}"],
        8,
        ["model.rope_scaling.type", "'magic'", "llama3"],
        ["model.rope_scaling={type: linear, factor: 2.0}"],
    ),
    "sequence_longer_than_learned_positions": (
        ["model.position_embedding_type=learned_absolute", "data.seq_length=128"],
        8,
        ["data.seq_length 128", "model.max_position_embeddings 64"],
        ["model.max_position_embeddings=128"],
    ),
    "eod_outside_the_vocabulary": (
        ["data.eod_token=257"],
        8,
        ["data.eod_token 257", "model.vocab_size 257", "258 or more"],
        ["data.eod_token=256"],
    ),
    "ffn_not_a_multiple_of_tensor": (
        ["model.ffn_hidden_size=130", "parallel.tensor=4"],
        8,
        ["model.ffn_hidden_size 130", "parallel.tensor 4", "128 or 132"],
        ["model.ffn_hidden_size=132"],
    ),
    "vocabulary_not_a_multiple_of_tensor": (
        ["model.make_vocab_size_divisible_by=1", "parallel.tensor=4"],
        8,
        ["vocabulary of 257", "parallel.tensor 4", "make_vocab_size_divisible_by to 4"],
        ["model.make_vocab_size_divisible_by=4"],
    ),
    "vocabulary_not_a_multiple_of_tensor_times_pipeline": (
        ["model.make_vocab_size_divisible_by=6", "parallel.tensor=2", "parallel.pipeline=4"],
        8,
        ["padded to 258", "parallel.tensor 2 × parallel.pipeline 4 = 8", "divisible_by to 24"],
        ["model.make_vocab_size_divisible_by=24"],
    ),
    "tp_comm_overlap_without_tensor": (
        ["parallel.tp_comm_overlap=true"],
        8,
        ["parallel.tp_comm_overlap is true", "not split", "null"],
        ["parallel.tp_comm_overlap=null"],
    ),
    "tp_comm_overlap_without_sequence_parallelism": (
        [
            "parallel.tp_comm_overlap=true",
            "parallel.tensor=2",
            "parallel.sequence_parallel=false",
        ],
        8,
        ["parallel.tp_comm_overlap is true", "sequence_parallel null or true"],
        ["parallel.sequence_parallel=null"],
    ),
    "tp_comm_overlap_on_a_pipeline_whose_stages_branch": (
        [
            "parallel.tp_comm_overlap=true",
            "parallel.tensor=2",
            "parallel.pipeline=2",
            "parallel.pipeline_schedule=interleaved",
            "parallel.virtual_pipeline=2",
            "train.num_microbatches=4",
        ],
        8,
        ["parallel.tp_comm_overlap is true", "2 stages", "chunks", "null or false"],
        ["parallel.tp_comm_overlap=null"],
    ),
    "sequence_parallel_without_tensor": (
        ["parallel.sequence_parallel=true"],
        8,
        ["parallel.sequence_parallel is true", "parallel.tensor is 1", "null"],
        ["parallel.sequence_parallel=null"],
    ),
    "sequence_not_a_multiple_of_tensor": (
        ["data.seq_length=62", "parallel.tensor=4"],
        8,
        ["data.seq_length 62", "parallel.tensor 4", "60 or 64", "sequence_parallel to false"],
        ["parallel.sequence_parallel=false"],
    ),
    "sequence_not_a_multiple_of_context_and_tensor": (
        ["data.seq_length=60", "parallel.tensor=2", "parallel.context=4"],
        8,
        ["data.seq_length 60", "2 × parallel.context 4", "× parallel.tensor 2", "56 or 64"],
        ["data.seq_length=64"],
    ),
    "sequence_not_two_chunks_for_each_member_of_context": (
        ["data.seq_length=44", "parallel.context=4"],
        8,
        ["data.seq_length 44", "2 × parallel.context 4", "40 or 48"],
        ["data.seq_length=48"],
    ),
    "more_members_exchange_heads_than_there_are_groups": (
        ["parallel.context=8", "parallel.context_strategy=all_to_all", "model.num_query_groups=2"],
        8,
        ["parallel.context 8 does not divide", "2 key/value groups", "hierarchical", "all_gather"],
        ["parallel.context_strategy=hierarchical", "parallel.context_all_to_all=2"],
    ),
    "tensor_leaves_too_few_groups_to_exchange": (
        [
            "parallel.context=2",
            "parallel.tensor=2",
            "parallel.context_strategy=all_to_all",
            "model.num_query_groups=2",
        ],
        8,
        ["parallel.context 2 does not divide", "1 key/value groups", "after parallel.tensor 2"],
        ["parallel.context_strategy=ring"],
    ),
    "hierarchical_without_a_size": (
        ["parallel.context=4", "parallel.context_strategy=hierarchical"],
        8,
        ["parallel.context_all_to_all is null", "parallel.context_all_to_all to 2"],
        ["parallel.context_all_to_all=2"],
    ),
    "hierarchical_in_one_group": (
        [
            "parallel.context=4",
            "parallel.context_strategy=hierarchical",
            "parallel.context_all_to_all=4",
        ],
        8,
        ["parallel.context_all_to_all 4", "two or more groups", "to 2"],
        ["parallel.context_all_to_all=2"],
    ),
    "size_of_the_exchange_without_hierarchical": (
        ["parallel.context=4", "parallel.context_all_to_all=2"],
        8,
        ["parallel.context_all_to_all is 2", "all_gather", "hierarchical", "null"],
        ["parallel.context_strategy=hierarchical"],
    ),
    "cut_documents_where_devices_compute_whole_rows": (
        [*CUT, "parallel.context_strategy=all_to_all", "model.num_query_groups=2"],
        8,
        ["context_cut_documents is 16", "all_to_all", "nothing to balance", "to null"],
        ["parallel.context_strategy=ring"],
    ),
    "cut_documents_that_see_each_other": (
        [*CUT, "data.reset_attention_mask=false"],
        8,
        ["context_cut_documents is 16", "data.reset_attention_mask to true"],
        ["data.reset_attention_mask=true"],
    ),
    "cut_documents_longer_than_a_row": (
        [*CUT, "parallel.context_cut_documents=65"],
        8,
        ["context_cut_documents is 65", "data.seq_length 64", "to 16, say", "to null"],
        ["parallel.context_cut_documents=16"],
    ),
    "cut_documents_with_a_window_of_places": (
        [*CUT, "model.window_size=8"],
        8,
        ["context_cut_documents is 16", "model.window_size is 8", "model.window_size to null"],
        ["parallel.context_cut_documents=null"],
    ),
    "cut_documents_and_experts_by_turns": (
        [*CUT, "model.num_experts=4", "model.moe_router_force_load_balancing=true"],
        8,
        [
            "model.moe_router_force_load_balancing is true",
            "model.moe_router_force_load_balancing to false",
        ],
        ["model.moe_router_force_load_balancing=false"],
    ),
    "tokens_ahead_in_a_row_of_one": (
        ["data.seq_length=1", "model.mtp_num_layers=1"],
        8,
        ["model.mtp_num_layers 1", "data.seq_length 1:", "set it to null"],
        ["model.mtp_num_layers=null"],
    ),
    "ring_inside_a_pipeline": (
        ["parallel.context=2", "parallel.pipeline=2", "parallel.context_strategy=ring"],
        8,
        [
            "context_strategy is ring",
            "parallel.pipeline is 2",
            "waits for ever where stages branch",
            "all_gather or all_to_all",
        ],
        ["parallel.context_strategy=all_gather"],
    ),
    "batch_not_a_multiple_of_microbatch_and_shards": (
        ["train.micro_batch_size=3"],
        8,
        ["train.global_batch_size is 8", "micro_batch_size 3", "fsdp 8", "to 24"],
        ["train.global_batch_size=24"],
    ),
    "microbatch_larger_than_the_batch": (
        ["train.micro_batch_size=16"],
        1,
        ["train.global_batch_size is 8", "train.micro_batch_size 16", "to 16"],
        ["train.global_batch_size=16"],
    ),
    "micro_batch_size_against_num_microbatches": (
        ["train.micro_batch_size=2", "train.num_microbatches=2"],
        8,
        ["train.micro_batch_size 2", "train.num_microbatches 2", "= 32", "8"],
        ["train.global_batch_size=32"],
    ),
    "eight_devices_with_tensor_three": (
        ["parallel.tensor=3"],
        8,
        ["tensor 3", "8 devices", "2 or 4"],
        ["parallel.tensor=2"],
    ),
    "devices_are_not_the_product_of_the_axes": (
        ["parallel.fsdp=2", "parallel.tensor=2"],
        8,
        ["fsdp 2 × tensor 2 = 4", "8", "parallel.fsdp to 4"],
        ["parallel.fsdp=4"],
    ),
    "two_open_axes": (
        ["parallel.data=-1"],
        8,
        ["parallel.data and parallel.fsdp are -1"],
        ["parallel.fsdp=1"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_fix(name: str) -> None:
    overrides, devices, words, _ = REFUSED[name]
    config = load_config(BASE, overrides)
    with pytest.raises(ConfigError) as caught:
        validate(config, devices)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(ConfigError):
        validate_for_training(config, devices)


@pytest.mark.parametrize("name", REFUSED)
def test_the_fix_works(name: str) -> None:
    overrides, devices, _, fix = REFUSED[name]
    validate(load_config(BASE, [*overrides, *fix]), devices)


@pytest.mark.parametrize(
    "overrides, devices",
    [
        ([], 1),
        ([], 8),
        (["parallel.tensor=8"], 8),
        (["parallel.tensor=2", "parallel.data=2"], 8),
        (["model.num_query_groups=1", "parallel.tensor=8"], 8),
        (["model.num_query_groups=null", "parallel.tensor=8"], 8),
        (["parallel.tensor=2", "parallel.sequence_parallel=false", "data.seq_length=63"], 2),
        (["train.micro_batch_size=2", "train.num_microbatches=4"], 1),
        (["train.num_microbatches=4"], 2),
        (["model.hidden_size=100", "model.kv_channels=8"], 1),
        (["model.rotary_percent=0.5", "model.kv_channels=4"], 1),
    ],
)
def test_what_works_is_accepted(overrides: list[str], devices: int) -> None:
    sizes = validate_for_training(load_config(BASE, overrides), devices)
    product = 1
    for size in sizes.values():
        product *= size
    assert product == devices


def test_all_problems_are_reported_at_once() -> None:
    config = load_config(
        BASE, ["model.num_query_groups=3", "model.ffn_hidden_size=129", "train.micro_batch_size=3"]
    )
    with pytest.raises(ConfigError) as caught:
        validate(config, 8)
    message = str(caught.value)
    assert "num_query_groups" in message
    assert "micro_batch_size" in message
    assert len(message.splitlines()) == 2


def test_a_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    fits = load_config(BASE, ["data.tokenizer=byte"])
    validate_for_training(fits, 1)
    config = load_config(BASE, ["data.tokenizer=byte", "model.vocab_size=256"])
    with pytest.raises(ConfigError, match="has 257 tokens.*set model.vocab_size to 257"):
        validate_for_training(config, 1)


def test_a_trace_of_steps_after_the_last_is_refused() -> None:
    overrides = ["observe.dir=run", "train.steps=10"]
    validate_for_training(load_config(BASE, [*overrides, "observe.profile_steps=[10, 12]"]), 1)
    late = load_config(BASE, [*overrides, "observe.profile_steps=[11, 12]"])
    with pytest.raises(ConfigError, match=r"profile_steps is \[11, 12\], but .* after step 10"):
        validate_for_training(late, 1)


def test_a_missing_tokenizer_is_refused_by_name() -> None:
    config = load_config(BASE, ["data.tokenizer=/nowhere/tokenizer.json"])
    with pytest.raises(ConfigError, match="data.tokenizer: .*nowhere"):
        validate_for_training(config, 1)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_on_its_devices(name: str) -> None:
    config = load_config({"preset": name})
    parallel = config.parallel
    validate(config, parallel.tensor * parallel.pipeline * parallel.expert * 4)


@pytest.mark.parametrize("name", ["tiny", "gpt2_124m", "llama2_7b", "llama3_8b"])
def test_a_preset_runs_for_a_few_steps_on_another_layout(name: str) -> None:
    config = load_config({"preset": name}, ["parallel.tensor=2", "train.steps=10"])
    assert validate_for_training(config, 8)["fsdp"] == 4


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["optimizer.lr_warmup_steps=20"], ["lr_warmup_steps", "20", "train.steps"]),
        (["optimizer.name=adamv"], ["optimizer.name", "adamv", "adamw"]),
    ],
)
def test_an_optimizer_that_cannot_be_built_is_refused(
    overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_for_training(load_config(BASE, overrides), 1)
    for word in words:
        assert word in str(caught.value)


def test_rules_that_layers_cannot_compute_with_are_all_that_is_said_of_them() -> None:
    """Six heads do not divide by 2 × 4 devices, but they cannot be split over them at all."""
    model = ["model.num_attention_heads=6", "model.num_query_groups=6", "model.kv_channels=8"]
    mesh = ["parallel.tensor=2", "parallel.data=4", "parallel.fsdp=1"]
    rules = ["parallel.rules={heads: [tensor, data]}"]
    with pytest.raises(ConfigError, match=r"parallel\.rules\.heads is \[tensor, data\]") as caught:
        validate_for_training(load_config(BASE, [*model, *mesh, *rules]), 8)
    assert "num_attention_heads" not in str(caught.value)
    assert "num_query_groups" not in str(caught.value)
