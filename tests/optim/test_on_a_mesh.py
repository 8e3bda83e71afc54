"""Updates of a model whose parameters lie on a mesh of 8 devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.optimizer import make_optimizer
from tests.optim.small_decoder import abstract_state, parameter_shardings, small_decoder

MODEL = small_decoder(add_bias_linear=True)
SHARDINGS = parameter_shardings(MODEL, fsdp=2, tensor=4)


def state_shardings(optimizer: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(optimizer, MODEL, SHARDINGS))


def random_like(shapes: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_two_steps_on_8_devices_with_tensor_4_equal_those_of_one(name: str):
    config = OptimizerConfig(
        name=name,
        lr=0.1,
        lr_decay_style="constant",
        decoupled_lr=0.05,
        muon_fp32_matmul_prec="highest",
        adafactor_min_dim_size_to_factor=16,
    )
    optimizer = make_optimizer(config, total_steps=2, logical_axes=MODEL.logical)

    def two_steps(params: Any, *gradients: Any) -> tuple[Any, Any]:
        state = optimizer.init(params)
        for grads in gradients:
            updates, state = optimizer.update(grads, state, params)
            params = jax.tree.map(jnp.add, params, updates)
        return params, state

    trees = [random_like(MODEL.shapes, seed) for seed in range(3)]
    one, one_state = jax.jit(two_steps)(*trees)
    spread, spread_state = jax.jit(
        two_steps, out_shardings=(SHARDINGS, state_shardings(optimizer))
    )(*[jax.tree.map(jax.device_put, tree, SHARDINGS) for tree in trees])
    query = spread["layers"]["attention"]["query"]
    assert query.addressable_shards[0].data.size == query.size // 8
    for a, b in zip(jax.tree.leaves((one, one_state)), jax.tree.leaves((spread, spread_state))):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_muons_momentum_lies_as_its_parameter_and_factored_moments_on_every_device():
    def of(name: str) -> Any:
        config = OptimizerConfig(name=name, lr=0.1, adafactor_min_dim_size_to_factor=16)
        optimizer = make_optimizer(config, total_steps=2, logical_axes=MODEL.logical)
        return state_shardings(optimizer)

    momentum = of("muon")[0].inner_states["muon"].inner_state.momentum
    for part in ("attention", "mlp"):
        for leaf in ("query", "key_value", "output", "up", "down"):
            if leaf in MODEL.shapes["layers"][part]:
                want = SHARDINGS["layers"][part][leaf]
                assert not want.is_fully_replicated
                assert momentum["layers"][part][leaf] == want
    for sharding in jax.tree.leaves(of("adafactor")[0]["layers"]["attention"]["query"]):
        assert sharding.spec == PartitionSpec()
