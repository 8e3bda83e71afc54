"""Initial weights: Megatron's distributions, the same on every mesh (O12)."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.models.decoder import Decoder
from jaxtron.program import Program
from tests.parity.harness import assert_replicas_equal, drawn_state, make_config

SMALL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}
MESHES: dict[str, dict[str, Any]] = {
    "data8": {"data": 8},
    "fsdp8-no_shard": {"fsdp": 8, "data_sharding": "no_shard"},
    "fsdp8-optim": {"fsdp": 8, "data_sharding": "optim"},
    "fsdp8-optim_grads": {"fsdp": 8, "data_sharding": "optim_grads"},
    "fsdp8-optim_grads_params": {"fsdp": 8, "data_sharding": "optim_grads_params"},
    "tensor8": {"tensor": 8},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}


def weights(seed: int = 1234, **model: Any) -> Any:
    """Initial parameters of a model, without a mesh."""
    config = make_config(model=model)
    init = jax.jit(Decoder(config.model).init)
    return jax.tree.map(np.asarray, init(jax.random.key(seed)))


def named(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(v) for p, v in leaves}


@functools.cache
def one_device() -> Any:
    state = drawn_state(Program(make_config(model=SMALL), jax.devices()[:1]))
    return jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("mesh", MESHES)
def test_initial_state_is_bitwise_the_same_on_every_mesh(mesh: str) -> None:
    program = Program(make_config(model=SMALL, parallel=MESHES[mesh]))
    state = drawn_state(program)
    assert_replicas_equal(state)
    for name, value in named(state).items():
        np.testing.assert_array_equal(value, named(one_device())[name], err_msg=name)


def test_weights_do_not_depend_on_the_padding_of_the_vocabulary() -> None:
    tight = named(weights(**SMALL, make_vocab_size_divisible_by=1))
    padded = named(weights(**SMALL, make_vocab_size_divisible_by=64))
    for name, value in padded.items():
        if name in ("embedding/word", "output/weight"):
            assert value.shape[0] == 128 and tight[name].shape[0] == 100
            assert not value[100:].any(), f"{name}: padding rows start at zero"
            value = value[:100]
        np.testing.assert_array_equal(value, tight[name], err_msg=name)


def test_a_layer_does_not_depend_on_the_number_of_layers_but_for_its_output_scale() -> None:
    two, six = named(weights(**SMALL)), named(weights(**{**SMALL, "num_layers": 6}))
    for name, value in two.items():
        longer = six[name][:2] if name.startswith("layers/") else six[name]
        if name in ("layers/attention/output", "layers/mlp/down"):
            # std / sqrt(2 L)
            np.testing.assert_allclose(value / longer, np.sqrt(6 / 2), rtol=1e-6)
        else:
            np.testing.assert_array_equal(value, longer, err_msg=name)


def test_layers_parts_and_seeds_differ() -> None:
    first, other = named(weights(**SMALL)), named(weights(seed=1, **SMALL))
    for name in ("layers/attention/query", "layers/mlp/up", "layers/mlp/down"):
        assert np.mean(first[name][0] == first[name][1]) < 1e-3, f"{name}: layers are alike"
        assert np.mean(first[name] == other[name]) < 1e-3, f"{name}: seeds are alike"
    assert np.mean(first["embedding/word"][:100] == first["output/weight"][:100]) < 1e-3


def test_weights_have_megatrons_distributions() -> None:
    std, num_layers = 0.05, 8
    params = named(
        weights(
            num_layers=num_layers,
            hidden_size=64,
            position_embedding_type="learned_absolute",
            normalization="LayerNorm",
            add_bias_linear=True,
            qk_layernorm=True,
            init_method_std=std,
        )
    )
    output_std = std / np.sqrt(2 * num_layers)
    expected = {
        "embedding/word": std,
        "embedding/position": std,
        "output/weight": std,
        "layers/attention/query": std,
        "layers/attention/key_value": std,
        "layers/attention/output": output_std,
        "layers/mlp/up": std,
        "layers/mlp/down": output_std,
    }
    for name, value in params.items():
        if name not in expected:
            fill = 0.0 if name.endswith("bias") else 1.0
            assert np.all(value == fill), f"{name}: biases start at 0, norm weights at 1"
            continue
        value = value[:100] if name in ("embedding/word", "output/weight") else value
        z = value.ravel() / expected[name]
        # 5 standard errors of mean, standard deviation and the normal share within one deviation
        assert abs(z.mean()) < 5 / np.sqrt(z.size), name
        assert abs(z.std() - 1) < 5 / np.sqrt(2 * z.size), name
        share = 0.682689
        assert abs(np.mean(np.abs(z) < 1) - share) < 5 * np.sqrt(share * (1 - share) / z.size), name
    assert set(expected) <= set(params)
