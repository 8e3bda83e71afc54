"""Which loop runs the layers."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxtron.errors import ConfigError
from jaxtron.layers.layer_loop import run_layers, unrolls
from jaxtron.layers.outputs import LayerOutput
from jaxtron.layers.remat import Remat
from tests.parity.harness import make_config

OFFLOAD = {"mlp_up": "offload", "core_attn": "save"}


@pytest.mark.parametrize(
    ("loop", "recompute", "platform", "differ", "expected"),
    [
        ("auto", "none", "cpu", False, False),
        ("auto", "none", "gpu", False, True),
        ("auto", OFFLOAD, "gpu", False, False),
        ("auto", {"mlp_up": "recompute"}, "gpu", False, True),
        ("auto", "none", "cpu", True, True),
        ("unroll", OFFLOAD, "cpu", False, True),
        ("scan", OFFLOAD, "gpu", False, False),
    ],
)
def test_the_loop_follows_device_and_policy(loop, recompute, platform, differ, expected) -> None:
    train = make_config(train={"layer_loop": loop, "recompute": recompute}).train
    assert unrolls(train, platform, layers_differ=differ) is expected


@pytest.mark.parametrize(
    ("loop", "differ", "message"),
    [("unroll", False, "offloads mlp_up, but train.layer_loop is unroll"), ("auto", True, "FP8")],
)
def test_offload_in_an_unrolled_loop_on_a_gpu_is_refused(loop, differ, message) -> None:
    train = dataclasses.replace(make_config().train, layer_loop=loop, recompute=OFFLOAD)
    with pytest.raises(ConfigError, match=message):
        unrolls(train, "gpu", layers_differ=differ)


@pytest.mark.parametrize("remat", [Remat(), Remat("full")], ids=["none", "full"])
def test_an_unrolled_loop_is_traced_once_for_layers_that_are_alike(remat: Remat) -> None:
    traced = []

    def layer(x, weights, number):
        traced.append(sorted(weights))
        return LayerOutput(jnp.sin(x @ weights["w"] + weights.get("b", 0) + number))

    w = jnp.full((3, 3), 0.1)
    layers = [{"w": w}, {"w": 2 * w}, {"w": w, "b": jnp.ones(3)}, {"w": 3 * w}]

    def objective(layers):
        return run_layers([layer], jnp.ones((2, 3)), layers, remat).x.sum()

    jax.make_jaxpr(jax.grad(objective))(layers)
    assert traced == [["w"], ["b", "w"]]
    x = jnp.ones((2, 3))
    for number, weights in enumerate(layers):
        x = jnp.sin(x @ weights["w"] + weights.get("b", 0) + number)
    assert jnp.allclose(objective(layers), x.sum())
