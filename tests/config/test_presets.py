"""The presets are the published models, in layouts whose state fits an 80 GB GPU."""

import dataclasses

import pytest

from jaxtron.config.load import load_config
from jaxtron.config.presets import preset_names
from jaxtron.config.state_bytes import state_bytes_per_device
from jaxtron.mesh.axes import resolve_axes
from jaxtron.observe.flops import parameter_count

GIGABYTE = 1e9
GPU_BYTES = 80 * GIGABYTE
LEAST_ROOM = 2 * GIGABYTE  # for activations, even with every layer recomputed

# Parameters as published with the weights; GPT-3's are counted from table 2.1 of its paper:
# 12 L h² + 13 L h + (V + S + 2) h.
PARAMETERS = {
    "gpt2_124m": 124_439_808,
    "gpt3_175b": 12 * 96 * 12288**2 + 13 * 96 * 12288 + (50257 + 2048 + 2) * 12288,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
}

# Layers, hidden, ffn, heads, groups, vocabulary, positions, RoPE base.
SHAPES = {
    "gpt2_124m": (12, 768, 3072, 12, 12, 50257, 1024, None),
    "gpt3_175b": (96, 12288, 49152, 96, 96, 50257, 2048, None),
    "llama2_7b": (32, 4096, 11008, 32, 32, 32000, 4096, 1e4),
    "llama2_13b": (40, 5120, 13824, 40, 40, 32000, 4096, 1e4),
    "llama2_70b": (80, 8192, 28672, 64, 8, 32000, 4096, 1e4),
    "llama3_8b": (32, 4096, 14336, 32, 8, 128256, 8192, 5e5),
    "llama3_70b": (80, 8192, 28672, 64, 8, 128256, 8192, 5e5),
    "llama31_405b": (126, 16384, 53248, 128, 8, 128256, 131072, 5e5),
}

# GPUs, tensor, pipeline, fsdp.
LAYOUTS = {
    "gpt3_175b": (128, 8, 4, 4),
    "llama2_7b": (8, 1, 1, 8),
    "llama2_13b": (8, 2, 1, 4),
    "llama2_70b": (32, 4, 2, 4),
    "llama3_8b": (8, 1, 1, 8),
    "llama3_70b": (32, 4, 2, 4),
    "llama31_405b": (256, 8, 8, 4),
}


def test_the_presets_are_those_tested_here() -> None:
    assert set(preset_names()) == set(PARAMETERS) | {"tiny"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    model = load_config({"preset": name}).model
    assert parameter_count(model, padded_vocab=False) == PARAMETERS[name]


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_the_published_ones(name: str) -> None:
    model = load_config({"preset": name}).model
    base = model.rotary_base if model.position_embedding_type == "rope" else None
    assert SHAPES[name] == (
        model.num_layers,
        model.hidden_size,
        model.ffn_hidden_size,
        model.num_attention_heads,
        model.query_groups,
        model.vocab_size,
        model.max_position_embeddings,
        base,
    )
    gpt = name.startswith("gpt")
    assert model.normalization == ("LayerNorm" if gpt else "RMSNorm")
    assert model.activation == ("gelu_tanh" if gpt else "swiglu")
    assert model.add_bias_linear == gpt
    assert model.untie_embeddings_and_output_weights == (not gpt)
    assert model.layernorm_epsilon == 1e-5


def test_llama_31_scales_its_rotary_frequencies() -> None:
    scaled = {n for n in SHAPES if load_config({"preset": n}).model.rope_scaling is not None}
    assert scaled == {"llama31_405b"}
    assert load_config({"preset": "llama31_405b"}).model.rope_scaling == {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_the_recommended_ones_and_their_state_fits(name: str) -> None:
    config = load_config({"preset": name})
    devices, tensor, pipeline, fsdp = LAYOUTS[name]
    axes = resolve_axes(config.parallel, devices)
    assert (axes["tensor"], axes["pipeline"], axes["fsdp"]) == (tensor, pipeline, fsdp)
    assert state_bytes_per_device(config, axes) <= GPU_BYTES - LEAST_ROOM

    # Data sharding is `optim` wherever that leaves the room, else the least that does.
    optim = dataclasses.replace(config.parallel, data_sharding="optim")
    as_optim = state_bytes_per_device(dataclasses.replace(config, parallel=optim), axes)
    fits = as_optim <= GPU_BYTES - LEAST_ROOM
    assert config.parallel.data_sharding == ("optim" if fits else "optim_grads")


# P and d of Llama 3 8B on fsdp 8, bytes by the formulas of the sharding levels (ZeRO-0/1/2/3).
_P = PARAMETERS["llama3_8b"]
_LAYER = 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336 + 2 * 4096


@pytest.mark.parametrize(
    "level, expected",
    [
        ("no_shard", 18 * _P),
        ("optim", 6 * _P + 12 * _P / 8),
        ("optim_grads", 2 * _P + 16 * _P / 8),
        ("optim_grads_params", 16 * _P / 8 + 2 * 2 * _LAYER),
    ],
)
def test_state_bytes_of_each_sharding_level(level: str, expected: float) -> None:
    config = load_config({"preset": "llama3_8b"}, [f"parallel.data_sharding={level}"])
    axes = resolve_axes(config.parallel, 8)
    assert state_bytes_per_device(config, axes) == pytest.approx(expected, abs=1)


def test_tensor_and_pipeline_divide_the_state() -> None:
    config = load_config({"preset": "llama31_405b"})
    axes = resolve_axes(config.parallel, 256)
    per_device = PARAMETERS["llama31_405b"] / 64
    assert state_bytes_per_device(config, axes) == pytest.approx(9 * per_device, rel=1e-9)
