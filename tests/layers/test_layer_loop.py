"""Which loop runs the layers."""

import dataclasses

import pytest

from jaxtron.errors import ConfigError
from jaxtron.layers.layer_loop import unrolls
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
