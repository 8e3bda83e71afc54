"""Loading: precedence, types, and messages that name the key, the value and the fix."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from jaxtron.config.config import Config
from jaxtron.config.dump import to_dict
from jaxtron.config.load import load_config
from jaxtron.config.presets import preset_names
from jaxtron.config.reads import check_reads
from jaxtron.config.schema import keys
from jaxtron.config.suggest import _FROM_MEGATRON, did_you_mean
from jaxtron.config.yaml_io import to_yaml
from jaxtron.errors import ConfigError


def load_error(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def test_overrides_replace_the_file_which_replaces_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "preset: llama3_8b\nmodel: {num_layers: 2, hidden_size: 512}\ntrain: {steps: 7}\n"
    )
    config = load_config(path, ["model.hidden_size=256", "optimizer.lr=1e-4"])
    assert config.model.hidden_size == 256
    assert config.model.num_layers == 2
    assert config.train.steps == 7
    assert config.optimizer.lr == 1e-4
    assert config.model.num_query_groups == 8
    assert config.data.seq_length == 8192


def test_a_model_preset_takes_the_model_alone() -> None:
    tiny = load_config({"preset": "tiny"})
    config = load_config({"preset": "tiny", "model": {"preset": "llama3_8b", "num_layers": 1}})
    llama = load_config({"preset": "llama3_8b"})
    assert config.model == dataclasses.replace(llama.model, num_layers=1)
    assert dataclasses.replace(config, model=tiny.model) == tiny


def test_presets_can_be_named_on_the_command_line() -> None:
    assert load_config(None, ["preset=tiny"]) == load_config({"preset": "tiny"})
    assert load_config("tiny") == load_config({"preset": "tiny"})
    overridden = load_config({"preset": "llama2_7b"}, ["train.steps=3", "preset=tiny"])
    assert overridden.model == load_config({"preset": "tiny"}).model
    assert overridden.train.steps == 3


def test_an_override_inside_a_mapping_keeps_its_other_entries() -> None:
    config = load_config({"preset": "llama31_405b"}, ["model.rope_scaling.factor=4"])
    assert config.model.rope_scaling == {
        "type": "llama3",
        "factor": 4,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = load_config({"preset": "tiny"}, ["parallel.rules.embed=[fsdp]"])
    assert config.parallel.rules == {"embed": ["fsdp"]}


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-4", 1e-4),
        ("3", 3.0),
        (".5", 0.5),
        ("2.5E+2", 250.0),
        ("1_000.5", 1000.5),
    ],
)
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    lr = load_config({"preset": "tiny"}, [f"optimizer.lr={text}"]).optimizer.lr
    assert lr == value
    assert isinstance(lr, float)


def test_words_stay_words(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: tiny\nobserve: {progress: on, dir: 12:30:45}\n")
    config = load_config(path, ["checkpoint.dir=2026-11-27"])
    assert config.observe.progress == "on"
    assert config.observe.dir == "12:30:45"
    assert config.checkpoint.dir == "2026-11-27"


@pytest.mark.parametrize(
    "override, words",
    [
        ("train.steps=ten", ["train.steps is 'ten'", "an integer ≥ 0"]),
        ("train.steps=1.5", ["train.steps is 1.5", "an integer"]),
        ("train.steps=true", ["train.steps is true", "an integer"]),
        ("train.steps=-1", ["train.steps is -1", "≥ 0"]),
        ("train.steps=010", ["train.steps is '010'"]),
        ("train.steps=null", ["train.steps is null"]),
        ("optimizer.lr=fast", ["optimizer.lr is 'fast'", "a number"]),
        ("optimizer.lr=.inf", ["optimizer.lr is inf", "a number ≥ 0 (a finite number)"]),
        ("optimizer.lr=.nan", ["optimizer.lr is nan", "a number ≥ 0 (a finite number)"]),
        ("data.split=-.inf", ["data.split is -inf", "a finite number"]),
        ("data.paths=[1.0e+400, a]", ["data.paths is [inf, 'a']", "a number"]),
        ("train.global_batch_size=0", ["train.global_batch_size is 0", "≥ 1"]),
        ("model.attention_dropout=1.0", ["model.attention_dropout is 1.0", "≥ 0 and < 1"]),
        ("model.normalization=rmsnorm", ["'rmsnorm'", "one of RMSNorm, LayerNorm"]),
        ("model.add_bias_linear=yes", ["'yes'", "true or false"]),
        ("model.num_query_groups=[1]", ["[1]", "an integer ≥ 1, or null"]),
        ("parallel.rules.embed=3", ["parallel.rules", "a mapping"]),
        ("data.paths=a/b", ["data.paths is 'a/b'", "a list of (text, or a number", "write [a/b]"]),
        ("data.fim_tokens={prefix:1}", ["data.fim_tokens", "a space follows the colon"]),
        ("data.cache_dir=s3://bucket/a", ["data.cache_dir is 's3://bucket/a'", "not a URL"]),
        ("observe.dir=s3://bucket/a", ["observe.dir is 's3://bucket/a'", "not a URL"]),
        ("checkpoint.load=gs://bucket/a", ["checkpoint.load is 'gs://bucket/a'", "not a URL"]),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_expectation(
    override: str, words: list[str]
) -> None:
    message = load_error({"preset": "tiny"}, override)
    for word in words:
        assert word in message


def test_no_key_takes_a_number_that_is_not_finite() -> None:
    """Those without another bound too; what a user's own function gets is the user's."""
    for info in [info for info in keys().values() if "a number" in info.expected]:
        for value in (math.inf, -math.inf, math.nan, 10**400):
            with pytest.raises(ConfigError, match=info.dotted):
                info.convert(value)
    assert keys()["optimizer.options"].convert({"clip": math.inf}) == {"clip": math.inf}


@pytest.mark.parametrize(
    "dotted, offered",
    [
        ("train.stepz", "train.steps"),
        ("train.lr", "optimizer.lr"),
        ("parralel.tensor", "parallel.tensor"),
        ("model.num_layer", "model.num_layers"),
        ("parallel.tensor_model_parallel_size", "parallel.tensor"),
        ("train.micro-batch-size", "train.micro_batch_size"),
        ("train.train_iters", "train.steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(dotted: str, offered: str) -> None:
    section, _, name = dotted.partition(".")
    for message in (
        load_error({"preset": "tiny"}, f"{dotted}=1"),
        load_error({"preset": "tiny", section: {name: 1}}),
    ):
        assert dotted.split(".")[0] in message
        if section in ("train", "parallel", "model"):
            assert offered in message


def test_every_name_offered_to_megatron_users_exists() -> None:
    assert set(_FROM_MEGATRON.values()) <= set(keys())


def test_nothing_similar_points_to_the_list_of_keys() -> None:
    assert "--help-config" in did_you_mean("zzz.qqq")


@pytest.mark.parametrize(
    "override",
    ["foo", "=3", "train.=3", "train=3", "parallel.tensor.size=2", "a.b=1", "train.steps=]"],
)
def test_a_malformed_override_is_refused_by_name(override: str) -> None:
    assert repr(override) in load_error({"preset": "tiny"}, override)


def test_all_problems_are_reported_at_once() -> None:
    message = load_error(
        {"preset": "tiny", "model": {"num_layers": 0}, "trian": {}, "data": {"seqlen": 3}},
        "optimizer.lr=x",
        "nonsense",
    )
    for word in ("model.num_layers", "trian", "data.seqlen", "optimizer.lr", "'nonsense'"):
        assert word in message
    assert "train.steps" not in message


def test_a_section_refuses_its_own_combinations_beside_other_problems() -> None:
    message = load_error({"preset": "tiny"}, "checkpoint.interval=5", "train.steps=x")
    assert "checkpoint.dir" in message
    assert "train.steps" in message


FP8 = {"fp8": "delayed", "fp8_amax_history_len": 16, "fp8_format": "e4m3"}
SETS = {"source": "indexed", "valid_sets": {"b": ["c"]}}
EVALUATION = {"data": SETS, "eval": {"interval": 10, "iters": 2, "test": True}}


@pytest.mark.parametrize(
    "source, override, left_out",
    [
        (
            {"precision": FP8},
            "precision.fp8=null",
            ["precision.fp8_format='e4m3'", "precision.fp8_amax_history_len=16"],
        ),
        ({"precision": FP8}, "precision.fp8=current", ["precision.fp8_amax_history_len=16"]),
        (
            EVALUATION,
            "eval.iters=0",
            ["data.valid_sets={'b': ['c']}", "eval.interval=10", "eval.test=true"],
        ),
        (
            # the tokens are read with the rate, which synthetic rows do not have
            {"data": {"source": "indexed", "fim_rate": 0.5, "fim_tokens": {"prefix": 1}}},
            "data.source=synthetic",
            ["data.fim_rate=0.5", "data.fim_tokens={'prefix': 1}"],
        ),
        (
            {"checkpoint": {"load": "/weights", "finetune": True}},
            "checkpoint.load=null",
            ["checkpoint.finetune=true"],
        ),
        (
            {"preset": "mixtral_8x7b"},
            "model.num_experts=null",
            ["model.moe_router_load_balancing_type='aux_loss'", "model.moe_aux_loss_coeff=0.02"],
        ),
        (
            {"preset": "mixtral_8x7b"},
            "optimizer.lr_decay_style=constant",
            ["optimizer.min_lr=3e-05"],
        ),
    ],
)
def test_what_an_override_turns_off_is_left_out_of_the_file_and_said(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    source: dict[str, Any],
    override: str,
    left_out: list[str],
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml({"preset": "tiny"} | source))
    check_reads(load_config(path))
    assert not caplog.records
    config = load_config(path, [override])
    check_reads(config)
    (said,) = caplog.messages
    assert str(path) in said and "the overrides" in said
    for words in left_out:
        assert words in said
        section, name = words.split("=")[0].split(".")
        assert getattr(getattr(config, section), name) == keys()[f"{section}.{name}"].default


def test_what_a_file_turns_off_is_left_out_of_its_preset_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = {"preset": "llama3_8b", "optimizer": {"lr_decay_style": "constant"}}
    config = load_config(source)
    check_reads(config)
    assert (config.optimizer.min_lr, config.optimizer.lr_decay_steps) == (0, None)
    (said,) = caplog.messages
    assert "the preset" in said and "optimizer.min_lr=3e-06" in said


@pytest.mark.parametrize(
    "source, overrides, key",
    [
        # given on the command line itself
        ({"precision": FP8}, ["precision.fp8=null", "precision.fp8_format=e4m3"], "fp8_format"),
        # the file contradicts itself
        ({"precision": FP8 | {"fp8": None}}, [], "fp8_format"),
        ({"precision": FP8 | {"fp8": None}}, ["train.steps=3", "precision.fp8=null"], "fp8_format"),
    ],
)
def test_what_no_override_has_turned_off_is_refused(
    source: dict[str, Any], overrides: list[str], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"precision.{key} is e4m3, but precision.fp8 is null"):
        check_reads(load_config({"preset": "tiny"} | source, overrides))


def test_required_keys_are_listed_with_their_meaning() -> None:
    message = load_error({"model": {"preset": "tiny"}})
    for key in ("data.seq_length", "train.steps", "train.global_batch_size"):
        assert f"{key} is missing" in message
    for name in preset_names():
        assert name in load_error(None)


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("preset: tiny\ntrain:\n  steps: 1\n  seed: 2\n  steps: 3\n")
    message = load_error(path)
    assert str(path) in message
    assert "'steps' in line 5" in message
    assert "line 3" in message


@pytest.mark.parametrize(
    "text, words",
    [
        ("model: [1", ["not valid YAML", "line"]),
        ("- a\n- b\n", ["expected sections"]),
        ("train: 5\n", ["train is 5", "section"]),
        ("preset: nope\n", ["'nope'", "tiny"]),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = load_error(path)
    for word in words:
        assert word in message


def test_a_missing_file_is_refused_and_a_preset_of_its_name_offered(tmp_path: Path) -> None:
    assert "absent.yaml" in load_error(tmp_path / "absent.yaml")
    assert "preset=llama3_8b" in load_error(tmp_path / "llama3_8b.yaml")


def test_an_empty_section_takes_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: tiny\nparallel:\n  # tensor: 2\n")
    assert load_config(path) == load_config({"preset": "tiny"})


def test_problems_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: tiny\ntrain: {steps: x}\n")
    assert load_error(path).startswith(f"{path}: train.steps")


def test_the_source_is_left_as_it_was() -> None:
    source = {"preset": "llama31_405b", "model": {"num_layers": 2}}
    load_config(source, ["model.num_layers=3", "model.rope_scaling.factor=2"])
    assert source == {"preset": "llama31_405b", "model": {"num_layers": 2}}
    factor = load_config({"preset": "llama31_405b"}).model.rope_scaling["factor"]  # type: ignore[index]
    assert factor == 8.0


@pytest.mark.parametrize("name", preset_names())
def test_the_resolved_configuration_loads_back_unchanged(name: str, tmp_path: Path) -> None:
    awkward = ["optimizer.lr=0.1234567890123456789e-4", "observe.dir='1e3'", "checkpoint.dir='on'"]
    config = load_config({"preset": name}, [*awkward, "observe.profile_steps=[2, 3]"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(to_dict(config)))
    assert load_config(path) == config
    assert load_config(to_dict(config)) == config
    assert isinstance(load_config(path), Config)


def test_the_resolved_configuration_shows_every_key() -> None:
    shown = to_dict(load_config({"preset": "tiny"}))
    dotted = itertools.chain.from_iterable(
        [f"{section}.{name}" for name in values] for section, values in shown.items()
    )
    assert set(dotted) == set(keys())


def test_a_misspelt_preset_is_offered_the_nearest_ones() -> None:
    with pytest.raises(
        ConfigError, match="llama3_8: No such file.* nor .*did you mean .*llama3_8b"
    ):
        load_config("llama3_8")
