"""Updates of a model whose parameters lie on a mesh of 8 devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtron.mesh.axes import AXES
from jaxtron.mesh.mesh import make_mesh
from jaxtron.mesh.rules import make_rules
from jaxtron.models.config import ModelConfig
from jaxtron.models.decoder import Decoder
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.optimizer import make_optimizer
from jaxtron.parallel.param_layout import is_layout, param_layouts
from jaxtron.parallel.state_sharding import optimizer_state_shardings

SIZES = {axis: {"fsdp": 2, "tensor": 4}.get(axis, 1) for axis in AXES}
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=4,
    ffn_hidden_size=32,
    vocab_size=64,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=16,
    add_bias_linear=True,
)


def random_like(shapes: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)


def shardings_of(model: Decoder) -> Any:
    mesh = make_mesh(SIZES, jax.devices()[:8])
    layouts = param_layouts(
        model.shapes, model.logical, make_rules({}, SIZES), "optim_grads_params", jnp.float32
    )
    return jax.tree.map(
        lambda lay: NamedSharding(mesh, lay.stored_spec), layouts, is_leaf=is_layout
    )


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_two_steps_on_8_devices_with_tensor_4_equal_those_of_one(name: str):
    model = Decoder(MODEL)
    config = OptimizerConfig(
        name=name,
        lr=0.1,
        lr_decay_style="constant",
        decoupled_lr=0.05,
        muon_fp32_matmul_prec="highest",
        adafactor_min_dim_size_to_factor=16,
    )
    optimizer = make_optimizer(config, total_steps=2, logical_axes=model.logical)
    shardings = shardings_of(model)
    state_shardings = optimizer_state_shardings(
        jax.eval_shape(optimizer.init, model.shapes), model.shapes, shardings
    )

    def two_steps(params: Any, *gradients: Any) -> tuple[Any, Any]:
        state = optimizer.init(params)
        for grads in gradients:
            updates, state = optimizer.update(grads, state, params)
            params = jax.tree.map(jnp.add, params, updates)
        return params, state

    trees = [random_like(model.shapes, seed) for seed in range(3)]
    one, one_state = jax.jit(two_steps)(*trees)
    spread, spread_state = jax.jit(two_steps, out_shardings=(shardings, state_shardings))(
        *[jax.tree.map(jax.device_put, tree, shardings) for tree in trees]
    )
    query = spread["layers"]["attention"]["query"]
    assert query.addressable_shards[0].data.size == query.size // 8
    for a, b in zip(jax.tree.leaves((one, one_state)), jax.tree.leaves((spread, spread_state))):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_muons_momentum_lies_as_its_parameter_and_factored_moments_on_every_device():
    model = Decoder(MODEL)
    shardings = shardings_of(model)

    def of(name: str) -> Any:
        config = OptimizerConfig(name=name, lr=0.1, adafactor_min_dim_size_to_factor=16)
        optimizer = make_optimizer(config, total_steps=2, logical_axes=model.logical)
        abstract = jax.eval_shape(optimizer.init, model.shapes)
        return optimizer_state_shardings(abstract, model.shapes, shardings)

    momentum = of("muon")[0].inner_states["muon"].inner_state.momentum
    for part in ("attention", "mlp"):
        for leaf in ("query", "key_value", "output", "up", "down"):
            if leaf in model.shapes["layers"][part]:
                want = shardings["layers"][part][leaf]
                assert not want.is_fully_replicated
                assert momentum["layers"][part][leaf] == want
    for sharding in jax.tree.leaves(of("adafactor")[0]["layers"]["attention"]["query"]):
        assert sharding.spec == PartitionSpec()
