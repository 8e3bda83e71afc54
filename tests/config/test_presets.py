"""The presets are the published models, in layouts whose state fits an 80 GB GPU."""

import re

import pytest

from jaxtron.config.load import load_config
from jaxtron.config.presets import preset_names, presets_dir
from jaxtron.mesh.axes import resolve_axes
from jaxtron.models.config import ModelConfig
from jaxtron.observe.flops import flops_per_token, parameter_count
from jaxtron.optim.schedule import check_schedule

GPU_BYTES = 80e9
LEAST_ROOM = 2e9  # for activations, even with every layer recomputed

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
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "deepseek_v2_lite": 15_706_484_224,
    # 671,026,419,200, and a depth of multi-token prediction
    "deepseek_v3": 671_026_419_200 + 11_610_068_224,
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
    "mixtral_8x7b": (32, 4096, 14336, 32, 8, 32000, 32768, 1e6),
    "qwen3_30b_a3b": (48, 2048, 6144, 32, 4, 151936, 40960, 1e6),
    "deepseek_v2_lite": (27, 2048, 10944, 16, 16, 102400, 163840, 1e4),
    "deepseek_v3": (61, 7168, 18432, 128, 128, 129280, 163840, 1e4),
}
# Experts, topk, expert ffn, parameters that a token uses, counted by hand with the whole embedding
# (published as 12.9, 3.3 and, without the embedding, 2.4 billion).
EXPERTS = {
    "mixtral_8x7b": (8, 2, 14336, 12_879_925_248),
    "qwen3_30b_a3b": (128, 8, 768, 3_353_032_704),
    "deepseek_v2_lite": (64, 6, 1408, 2_661_150_208),
    # 37,552,297,472 (published as 37 billion) and those of the depth
    "deepseek_v3": (256, 8, 2048, 37_552_297_472 + 688_100_608),
}

# GPUs, tensor, pipeline, fsdp; expert where it is not 1.
LAYOUTS = {
    "gpt3_175b": (128, 8, 4, 4),
    "llama2_7b": (8, 1, 1, 8),
    "llama2_13b": (8, 2, 1, 4),
    "llama2_70b": (32, 4, 2, 4),
    "llama3_8b": (8, 1, 1, 8),
    "llama3_70b": (32, 4, 2, 4),
    "llama31_405b": (256, 8, 8, 4),
    "mixtral_8x7b": (32, 1, 1, 4, 8),
    "qwen3_30b_a3b": (16, 1, 1, 2, 8),
    "deepseek_v2_lite": (8, 1, 1, 1, 8),
    "deepseek_v3": (1024, 1, 1, 16, 64),
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
    assert model.layernorm_epsilon == (1e-6 if name.startswith(("qwen", "deepseek")) else 1e-5)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_and_active_parameters_are_the_published_ones(name: str) -> None:
    model = load_config({"preset": name}).model
    experts, topk, ffn, active = EXPERTS[name]
    assert (model.num_experts, model.moe_router_topk, model.expert_ffn) == (experts, topk, ffn)
    layers = model.num_layers - model.num_dense_layers + (model.mtp_num_layers or 0)
    idle = layers * (experts - topk) * 3 * model.hidden_size * ffn
    assert PARAMETERS[name] - idle == active
    # per token 6 operations for each active parameter, less the embedding and the norms, which do
    # no matrix product
    flops = flops_per_token(model, 2)
    value = model.v_head_dim if model.multi_latent_attention else model.head_dim
    depths = model.mtp_num_layers or 0
    attention = (
        6 * (model.num_layers + depths) * (model.head_dim + value) * model.num_attention_heads
    )
    embedding = model.vocab_size * model.hidden_size
    products = (flops.causal - attention) / 6
    # every depth of multi-token prediction goes through the output layer once more
    assert products == pytest.approx(active + (depths - 1) * embedding, rel=1e-3)


def test_llama_31_scales_its_rotary_frequencies() -> None:
    scaled = {n for n in SHAPES if load_config({"preset": n}).model.rope_scaling is not None}
    assert scaled == {"llama31_405b", "deepseek_v2_lite", "deepseek_v3"}
    assert load_config({"preset": "llama31_405b"}).model.rope_scaling == {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def state_bytes(parameters: float, shards: int, data_sharding: str) -> float:
    """Weights, gradients and AdamW state of ``parameters`` per device: bf16 weights 2P, fp32
    gradients 4P, fp32 master weights and moments 12P, as far as ZeRO does not divide them.
    """
    return {
        "no_shard": 18 * parameters,
        "optim": 6 * parameters + 12 * parameters / shards,
        "optim_grads": 2 * parameters + 16 * parameters / shards,
    }[data_sharding]


def state_of(name: str, data_sharding: str, model: ModelConfig) -> float:
    """State bytes per device; of experts a device has its part and shards it over fsdp alone."""
    _, tensor, pipeline, fsdp, *rest = LAYOUTS[name]
    expert = rest[0] if rest else 1
    experts = 0
    if model.num_experts is not None:
        width = model.hidden_size * model.expert_ffn
        layers = model.num_layers - model.num_dense_layers + (model.mtp_num_layers or 0)
        experts = layers * model.num_experts * 3 * width
    dense = parameter_count(model) - experts
    stage = tensor * pipeline
    return state_bytes(dense / stage, fsdp * expert, data_sharding) + state_bytes(
        experts / (stage * expert), fsdp, data_sharding
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_the_recommended_ones_and_their_state_fits(name: str) -> None:
    config = load_config({"preset": name})
    devices, tensor, pipeline, fsdp, *expert = LAYOUTS[name]
    axes = resolve_axes(config.parallel, devices)
    assert (axes["tensor"], axes["pipeline"], axes["fsdp"]) == (tensor, pipeline, fsdp)
    assert axes["expert"] == (expert[0] if expert else 1)

    # Data sharding is `optim` wherever that leaves room, else the least that does.
    room = GPU_BYTES - LEAST_ROOM
    fits = [
        level for level in ("optim", "optim_grads") if state_of(name, level, config.model) <= room
    ]
    assert config.parallel.data_sharding == fits[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_comment_of_a_preset_gives_its_parameters_and_state(name: str) -> None:
    text = (presets_dir() / f"{name}.yaml").read_text().split("model:")[0].replace("\n# ", " ")
    config = load_config({"preset": name})
    devices = LAYOUTS[name][0]
    gigabytes = state_of(name, config.parallel.data_sharding, config.model) / 1e9
    assert f"{PARAMETERS[name]:,} parameters" in text
    assert f"{devices} GPUs" in text
    # The fullest device holds a little more than the mean: uneven stages, replicated biases.
    stated = float(re.search(r"State: ([\d.]+) GB of 80 GB", text).group(1))  # type: ignore[union-attr]
    assert stated == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_can_run_for_a_few_steps_alone(name: str) -> None:
    config = load_config(name, ["train.steps=100"])
    check_schedule(config.optimizer, total_steps=config.train.steps)
