"""A value that nothing reads under the other choices is refused, and no key is forgotten."""

import types
import typing
from typing import Literal

import pytest

from jaxtron.config.load import load_config
from jaxtron.config.presets import preset_names
from jaxtron.config.reads import OWN, READ_UNDER, check_reads, is_read
from jaxtron.config.schema import keys
from jaxtron.errors import ConfigError
from jaxtron.optim.optimizer import OPTIMIZERS

ALWAYS_READ = {
    "model": "architecture num_layers hidden_size ffn_hidden_size num_attention_heads "
    "num_query_groups kv_channels vocab_size make_vocab_size_divisible_by max_position_embeddings "
    "normalization layernorm_epsilon fp32_residual_connection activation add_bias_linear "
    "add_qkv_bias qk_layernorm multi_latent_attention position_embedding_type "
    "untie_embeddings_and_output_weights init_method_std attention_dropout hidden_dropout "
    "window_size attention_backend gated_mlp_backend num_experts mtp_num_layers",
    "parallel": "data fsdp pipeline tensor context expert data_sharding overlap_param_gather "
    "overlap_grad_reduce reduce_scatter_with_fp32_accumulation dynamic_context rules",
    "data": "source seq_length tokenizer reset_position_ids reset_attention_mask eod_mask_loss "
    "dataloader_type num_workers num_threads",
    "train": "steps global_batch_size rampup_batch_size micro_batch_size num_microbatches "
    "microbatches_at_once seed layer_loop recompute exit_duration_min exit_interval "
    "exit_signal_handler",
    "optimizer": "name lr lr_decay_style lr_warmup_steps decoupled_lr override_opt_param_scheduler "
    "offload clip_grad grad_norm_skip_threshold",
    "precision": "compute logits params grads grad_reduce fp8",
    "loss": "reduction z_loss_coeff chunk_tokens",
    "checkpoint": "dir load async_save verify file_checksums",
    "observe": "dir log_interval tensorboard progress peak_tflops",
    "runtime": "cpu_devices xla_flags deterministic matmul_precision compilation_cache_dir "
    "coordinator_address num_processes process_id initialization_timeout_s heartbeat_timeout_s "
    "stall_timeout_s",
}
"""Under every choice, or with nothing to lose where they are not."""

OTHER_CHECKS = {
    "parallel": "sequence_parallel tp_comm_overlap context_strategy context_cut_documents "
    "virtual_pipeline pipeline_schedule pipeline_layout",
}
"""Refused by ``validate_*``, or idle only on a mesh axis of one device, which is no choice."""

BASE = {
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    },
    "data": {"seq_length": 16},
    "train": {"steps": 4, "global_batch_size": 4},
    "optimizer": {"lr": 0.1},
}

# Values other than the default and than what turns a feature off, where the type does not say one.
VALUES = {
    "checkpoint.dir": "/run/checkpoints",
    "checkpoint.keep": 4,
    "checkpoint.load": "/run/checkpoints",
    "data.chat_template": "llama3",
    "data.fim_rate": 0.5,
    "data.fim_spm_rate": 0.25,
    "data.fim_tokens": {"prefix": 1},
    "data.num_threads": 2,
    "data.split": "1",
    "data.valid_sets": {"code": ["/data/code"]},
    "observe.dir": "/run",
    "observe.profile_steps": [2, 3],
    "optimizer.adafactor_clip_threshold": 2.0,
    "optimizer.weight_decay": 0.2,
    "precision.min_loss_scale": 0.5,
    "runtime.local_device_ids": [0],
}
OFF = {"data.paths": [], "precision.loss_scale": 8.0, "runtime.cpu_devices": 8}
OPTIMIZER_NAMES = ("sgd", "adamw", "outside:function")
COMPANIONS = {"eval.test": {"eval.interval": 1, "eval.iters": 1}}

PAIRS = [(key, choice) for key, choices in READ_UNDER.items() for choice in choices]


def kinds(key):
    """The types of which a key's value may be."""
    kind = keys()[key].type
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


def words(key):
    """The values of a key that takes one of some words."""
    return [w for k in kinds(key) if typing.get_origin(k) is Literal for w in typing.get_args(k)]


def value_for(key):
    """A value of the key that says something: not the default, not what turns it off."""
    if key in VALUES:
        return VALUES[key]
    default = keys()[key].default
    if words(key):
        return next(word for word in words(key) if word != default)
    for kind, value in (
        (bool, not default),
        (int, (default or 1) + 1 if isinstance(default, int | None) else None),
        (float, (default or 0.1) / 2 if isinstance(default, float | None) else None),
        (str, "/data"),
        (list, ["/data/text"]),
        (dict, {"a": "b"}),
    ):
        if kind in [typing.get_origin(k) or k for k in kinds(key)]:
            return value
    raise AssertionError(key)


def made(choice):
    """A value under which the choice holds."""
    if not choice.among:
        return value_for(choice.key) if not keys()[choice.key].default else VALUES[choice.key]
    return "outside:function" if choice.among[0] == OWN else choice.among[0]


def not_made(choice):
    """A value under which the choice does not hold."""
    if choice.key in OFF:
        return OFF[choice.key]
    named = {"optimizer.name": OPTIMIZER_NAMES, "data.source": ("synthetic", "chat")}
    for word in named.get(choice.key, words(choice.key) if choice.among else []):
        if word not in choice.among:
            return word
    if choice.among == (False,):
        return True
    kind = kinds(choice.key)[0]
    zero = {bool: False, int: 0, float: 0.0}
    return None if types.NoneType in kinds(choice.key) else zero[kind]


def raw_of(values):
    raw = {section: dict(given) for section, given in BASE.items()}
    for key, value in values.items():
        section, name = key.split(".")
        raw.setdefault(section, {})[name] = value
    return raw


@pytest.mark.parametrize("key, choice", PAIRS, ids=[f"{k} {c.key}" for k, c in PAIRS])
def test_a_value_that_nothing_reads_is_refused_naming_both_keys(key, choice):
    values = {c.key: made(c) for c in READ_UNDER[key]} | {key: value_for(key)}
    for name in list(values):
        values = COMPANIONS.get(name, {}) | values
    assert is_read(raw_of(values), key), values
    values[choice.key] = not_made(choice)
    assert not is_read(raw_of(values), key), values
    with pytest.raises(ConfigError) as caught:
        check_reads(load_config(raw_of(values)))
    assert key in str(caught.value) and choice.key in str(caught.value)


def test_the_message_has_the_value_and_what_would_be_right():
    raw = raw_of({"optimizer.muon_momentum": 0.9, "data.fim_spm_rate": 1.0})
    with pytest.raises(ConfigError) as caught:
        check_reads(load_config(raw))
    assert str(caught.value).splitlines() == [
        "data.fim_spm_rate is 1.0, but data.fim_rate is 0.0, under which nothing reads it: set "
        "data.fim_rate, or leave data.fim_spm_rate at 0.5",
        "optimizer.muon_momentum is 0.9, but optimizer.name is adamw, under which nothing reads "
        "it: set optimizer.name to muon or module:function, or leave optimizer.muon_momentum at "
        "0.95",
    ]


OTHERS = [(key, c, other) for key, c in PAIRS for other in c.others]


@pytest.mark.parametrize("key, choice, other", OTHERS, ids=[f"{k} {o.key}" for k, _, o in OTHERS])
def test_one_of_several_choices_is_enough(key, choice, other):
    values = {c.key: made(c) for c in READ_UNDER[key]} | {key: value_for(key)}
    values[choice.key] = not_made(choice)
    values[other.key] = made(other)
    assert is_read(raw_of(values), key), values


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"data.prefetch": 8, "data.num_threads": 0},
            "data.prefetch is 8, but data.num_threads is 0 and data.num_workers is 0, under which "
            "nothing reads it: set data.num_threads, or set data.num_workers, or leave "
            "data.prefetch at 2",
        ),
        (
            {"optimizer.apply_wd_to_qk_layernorm": True},
            "optimizer.apply_wd_to_qk_layernorm is true, but model.qk_layernorm is false and ",
        ),
        (
            {
                "optimizer.apply_wd_to_qk_layernorm": True,
                "model.qk_layernorm": True,
                "optimizer.weight_decay": 0.0,
            },
            "optimizer.apply_wd_to_qk_layernorm is true, but optimizer.weight_decay is 0.0 and ",
        ),
        (
            {"data.valid_paths": ["a"], "data.train_paths": ["b"]},
            "data.valid_paths is ['a'], but eval.interval is 0, under which nothing reads it: set "
            "eval.interval, or leave data.valid_paths at []",
        ),
        (
            {"eval.interval": 5},
            "eval.interval is 5, but eval.iters is 0 and eval.full_validation is false, ",
        ),
        (
            {
                "optimizer.name": "mine:lamb",
                "optimizer.weight_decay_incr_style": "linear",
                "optimizer.start_weight_decay": 0.0,
                "optimizer.end_weight_decay": 0.1,
            },
            "optimizer.weight_decay_incr_style is linear, but optimizer.name is mine:lamb, ",
        ),
        (
            {"optimizer.end_weight_decay": 0.1},
            "optimizer.end_weight_decay is 0.1, but optimizer.weight_decay_incr_style is constant",
        ),
        ({"data.eod_token": 3, "data.source": "chat"}, "eod_token is 3, but data.source is chat"),
        ({"data.eod_token": 3}, "data.eod_token is 3, but data.reset_attention_mask is false and "),
        (
            {"checkpoint.load": "/dense", "checkpoint.moe_use_upcycling": True},
            "checkpoint.moe_use_upcycling is true, but model.num_experts is null, under which "
            "nothing reads it: set model.num_experts, or leave checkpoint.moe_use_upcycling at "
            "false",
        ),
        (
            {
                "checkpoint.load": "/dense",
                "checkpoint.finetune": True,
                "checkpoint.moe_use_upcycling": True,
                "model.num_experts": 4,
            },
            "checkpoint.finetune is true, but checkpoint.moe_use_upcycling is true, under which "
            "nothing reads it: set checkpoint.moe_use_upcycling to false, or leave "
            "checkpoint.finetune at false",
        ),
        (
            {"runtime.gpu_memory_fraction": 0.5, "runtime.cpu_devices": 8},
            "runtime.gpu_memory_fraction is 0.5, but runtime.cpu_devices is 8, ",
        ),
    ],
)
def test_the_choice_that_leaves_a_value_unread_is_named(keys, message):
    with pytest.raises(ConfigError) as caught:
        check_reads(load_config(raw_of(keys)))
    assert message in str(caught.value)


def test_an_own_optimizer_gets_a_constant_weight_decay_alone():
    (choice,) = READ_UNDER["optimizer.weight_decay_incr_style"]
    assert set(choice.among) == set(OPTIMIZERS)


def test_every_key_is_in_the_table_or_read_always():
    placed = [*READ_UNDER]
    for names in (ALWAYS_READ, OTHER_CHECKS):
        placed += [f"{section}.{name}" for section, text in names.items() for name in text.split()]
    assert sorted(placed) == sorted(keys())


@pytest.mark.parametrize("name", preset_names())
def test_presets_set_nothing_in_vain(name):
    check_reads(load_config(name))
