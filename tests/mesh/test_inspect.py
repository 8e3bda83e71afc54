import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxtron.config.load import load_config
from jaxtron.errors import ConfigError
from jaxtron.mesh import grid
from jaxtron.mesh.features import features
from jaxtron.mesh.inspect import default_devices, inspect_layout
from jaxtron.mesh.mesh import make_mesh
from jaxtron.program import Program

# 4 layers, hidden 64, 8 heads, 2 key/value groups, head_dim 8, ffn 128, vocabulary 257 -> 384
MESHES = [
    {"tensor": 8},
    {"fsdp": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 4, "tensor": 2, "data_sharding": "optim_grads_params"},
    {"fsdp": 8, "data_sharding": "no_shard"},
]


def tiny(**parallel):
    return load_config(
        "configs/tiny.yaml", [f"parallel.{name}={value}" for name, value in parallel.items()]
    )


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_shards_are_those_that_jax_makes(parallel):
    inspection = inspect_layout(tiny(**parallel), 8)
    mesh = make_mesh(inspection.sizes)
    for param in inspection.params:
        sharding = NamedSharding(mesh, param.layout.stored_spec)
        assert sharding.shard_shape(param.shape) == param.stored
        for device, index in sharding.devices_indices_map(param.shape).items():
            point = grid.coordinates(inspection.sizes, device.id)
            held = tuple((range(*i.indices(dim)),) for i, dim in zip(index, param.shape))
            assert param.held_by(inspection.sizes, point) == held, param.name


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_stored_bytes_are_those_of_the_arrays_that_training_makes(parallel):
    config = tiny(**parallel)
    # Zeros put in place: compiling the initialisation would take most of a minute.
    state = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        Program(config).abstract_state(),
    )
    current = inspect_layout(config, 8).current
    first = jax.devices()[0]

    def held(tree):
        arrays = jax.tree.leaves(tree)
        return sum(s.data.nbytes for a in arrays for s in a.addressable_shards if s.device == first)

    assert current.params == held(state["params"])
    assert current.optimizer == held(state["opt_state"])


def test_state_follows_the_closed_forms_of_zero():
    config = load_config("configs/llama2_7b.yaml")
    inspection = inspect_layout(config, 8)
    # Llama 2 7B: 6,738,415,616 parameters, all but 266,240 of them in matrices.
    p, shards, layer = 6_738_415_616, 8, 4 * 4096**2 + 3 * 4096 * 11008
    assert inspection.parameter_count == p
    expected = {
        "no_shard": 18 * p,
        "optim": 6 * p + 12 * p / shards,
        "optim_grads": 2 * p + 16 * p / shards,
        "optim_grads_params": 16 * p / shards + 2 * 2 * layer,
    }
    for entry in inspection.state:
        assert entry.total == pytest.approx(expected[entry.level], rel=1e-3), entry.level


@pytest.mark.parametrize(
    "preset, devices, gigabytes",
    # 6 P + 12 P / 4 of 68,976,648,192 / 8 parameters, and 6 P + 12 P / 8 of 6,738,415,616;
    # 2 (E / 64 + D + R) + 16 (E + D - M) / 1024 + 16 M / 64 of E = 665,183,059,968 parameters of
    # experts and D = 17,453,427,456 others, R = 108,265,472 of them in routers, copied in fp32, and
    # M = 3,380,609,024 in projections from latents, none of whose dimensions divides by 1024
    [("llama2_70b", 32, 77.6), ("llama2_7b", 8, 50.5), ("deepseek_v3", 1024, 67.4)],
)
def test_presets_state_on_their_layout(preset, devices, gigabytes):
    inspection = inspect_layout(load_config(f"configs/{preset}.yaml"), devices)
    assert inspection.current.total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_without_a_number_of_devices_an_open_axis_counts_as_one():
    assert default_devices(tiny(tensor=2, data=3)) == 6


def test_layers_of_uneven_stages_are_those_of_the_layout():
    inspection = inspect_layout(load_config("configs/llama31_405b.yaml"), 256)
    norm = next(p for p in inspection.params if p.name == "layers/mlp_norm/weight")
    counts = []
    for stage in range(8):
        point = grid.coordinates(inspection.sizes, 32 * stage)
        [held] = norm.held_by(inspection.sizes, point)[0]
        counts.append(len(held))
    assert counts == [15, *[16] * 6, 15]
    assert norm.layout.shape[0] == 8 * 16  # room for the fullest on every stage
    assert norm.shape == (126, 16384) and norm.size == 126 * 16384


def feature(inspection, name):
    return dict(features(inspection))[name]


def test_features_show_what_is_really_on():
    one = inspect_layout(tiny(), 1)
    assert feature(one, "sequence parallelism") == "off (tensor is 1)"
    assert "without effect" in feature(one, "data sharding")
    assert feature(one, "training") == "possible in this version"
    eight = inspect_layout(tiny(data=2, tensor=4), 8)
    assert "1 of 2, replicated key/value heads" in feature(eight, "tensor parallelism")
    assert feature(eight, "sequence parallelism").startswith("on: 4 parts")
    assert "without effect" in feature(eight, "data sharding")
    hybrid = inspect_layout(tiny(data=2, fsdp=4), 8)
    assert "in 4 parts over fsdp, in 2 replicas (HSDP)" in feature(hybrid, "data sharding")
    assert feature(hybrid, "batch") == "8 sequences = 1 microbatches × 8 data shards × 1"
    apart = ["data.reset_attention_mask=true", "data.reset_position_ids=true", "data.eod_token=0"]
    cut = ["parallel.context=4", "parallel.dynamic_context=true", "parallel.fsdp=2", *apart]
    dynamic = inspect_layout(load_config("configs/tiny.yaml", cut), 8)
    assert feature(dynamic, "batch").startswith("8 sequences, whose documents are cut into")
    staged = inspect_layout(tiny(pipeline=2), 2)
    assert feature(staged, "pipeline parallelism") == "2 stages of 2 layers, schedule 1f1b"
    assert feature(staged, "training") == "possible in this version"
    behind = inspect_layout(tiny(pipeline=2, overlap_grad_reduce="true"), 2)
    assert "parallel.overlap_grad_reduce is true" in feature(behind, "training")
    refused = inspect_layout(tiny(pipeline=2, data_sharding="optim_grads_params"), 2)
    assert "parallel.pipeline is 2" in feature(refused, "training")


def test_exceptions_from_fp8_that_name_nothing_are_shown_as_training_refuses_them():
    wrong = ["precision.fp8=current", "precision.fp8_exceptions=['*/mlp/upp']"]
    inspection = inspect_layout(load_config("configs/tiny.yaml", wrong), 1)
    assert "'*/mlp/upp' names no product" in feature(inspection, "training")
    right = [wrong[0], "precision.fp8_exceptions=['*/mlp/up']"]
    inspection = inspect_layout(load_config("configs/tiny.yaml", right), 1)
    assert feature(inspection, "training") == "possible in this version"


def test_matrices_that_data_sharding_cannot_divide_are_named():
    # 3 divides no dimension of the model but none of 384 rows of the vocabulary.
    config = load_config("configs/tiny.yaml", ["train.global_batch_size=6", "parallel.fsdp=3"])
    inspection = inspect_layout(config, 3)
    text = feature(inspection, "data sharding")
    assert "kept whole: " in text
    whole = text.partition("kept whole: ")[2].split(", ")
    assert "layers/mlp/up" in whole and "embedding/word" not in whole
    assert not any("norm" in name for name in whole)  # vectors are whole on purpose


def test_what_some_axes_divide_is_split_over_these_and_named():
    # 8 data shards; 12 rows and 4 columns divide by 4 at most
    config = load_config(
        "configs/tiny.yaml",
        ["parallel.fsdp=2", "parallel.context=4", "train.global_batch_size=8"]
        + ["model.hidden_size=12", "model.num_attention_heads=3", "model.num_query_groups=1"]
        + ["model.kv_channels=4"],
    )
    inspection = inspect_layout(config, 8)
    layouts = {param.name: param.layout for param in inspection.params}
    assert layouts["layers/attention/query"].zero_axes == ("context",)
    assert layouts["embedding/word"].zero_axes == ("fsdp", "context")
    text = feature(inspection, "data sharding")
    assert "layers/attention/query over context" in text.partition("divided by some of them")[2]


def test_overridden_rules_show_in_the_layout():
    config = load_config("configs/tiny.yaml", ["parallel.tensor=2", "parallel.rules.vocab=null"])
    inspection = inspect_layout(config, 2)
    [word] = [p for p in inspection.params if p.name == "embedding/word"]
    assert word.stored == (384, 64)


def test_a_number_of_devices_that_the_axes_do_not_make_is_refused():
    with pytest.raises(ConfigError, match=r"parallel: tensor 2 .* 7"):
        inspect_layout(tiny(tensor=2), 7)


def test_thousands_of_devices_need_no_devices():
    config = load_config(
        "configs/llama3_70b.yaml",
        ["parallel.fsdp=-1", "train.global_batch_size=4096"],
    )
    inspection = inspect_layout(config, 4096)
    assert inspection.num_devices == 4096
    assert math.prod(inspection.sizes.values()) == 4096


def test_gradients_in_bf16_take_half_the_bytes():
    config = load_config("configs/tiny.yaml", ["precision.grads=bf16"])
    for plain, half in zip(inspect_layout(tiny(), 8).state, inspect_layout(config, 8).state):
        assert 2 * half.gradients == plain.gradients
        assert plain.total - half.total == half.gradients


def test_features_name_fp8_and_dynamic_degrees():
    overrides = ["precision.fp8=current", "precision.first_last_layers_bf16=true"]
    overrides += ["parallel.context=4", "parallel.dynamic_context=true", "data.packing=best_fit"]
    overrides += ["data.source=chat", "data.tokenizer=byte"]
    overrides += ["data.reset_attention_mask=true", "data.reset_position_ids=true"]
    inspection = inspect_layout(load_config("tiny", overrides), 8)
    fp8 = "products of layers in FP8 (current, hybrid), with exceptions"
    assert feature(inspection, "precision").endswith(fp8)
    assert "1 to 4 parts by a document's length" in feature(inspection, "context parallelism")
