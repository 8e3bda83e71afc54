"""Patterns of layers with and without experts."""

import math

import jax
import numpy as np
import pytest

from jaxtron.models.decoder import Decoder
from jaxtron.models.layer_pattern import cut_pattern, layer_pattern
from jaxtron.observe.flops import flops_per_token, parameter_count
from tests.moe.block import model_config


@pytest.mark.parametrize(
    ("freq", "first", "block"),
    [
        (1, 0, (1,)),
        (2, 0, (1, 0)),
        (4, 0, (1, 0, 0, 0)),
        ([0, 1, 1, 1, 1, 1, 1, 1], 1, (1,)),
        ([0, 1, 0, 1, 0, 1, 0, 1], 0, (0, 1)),
        ([0, 0, 1, 0, 1, 0, 1, 0], 2, (1, 0)),
        ([1, 1, 0, 1, 0, 0, 1, 1], 0, (1, 1, 0, 1, 0, 0, 1, 1)),
        ([0, 0, 0, 1, 1, 0, 1, 1], 2, (0, 1, 1)),
    ],
    ids=str,
)
def test_a_pattern_is_cut_in_dense_layers_and_the_block_that_repeats(freq, first, block) -> None:
    assert cut_pattern(layer_pattern(8, freq)) == (first, block)


@pytest.mark.parametrize("freq", [2, [0, 1, 1, 0], [0, 0, 1, 1]], ids=str)
def test_layers_begin_alike_whatever_the_pattern_and_all_are_counted(freq) -> None:
    config = model_config(num_layers=4, moe_layer_freq=freq)
    params = Decoder(config).init(jax.random.key(3))
    plain = Decoder(model_config(num_layers=4)).init(jax.random.key(3))
    size, first = len(config.layer_block), config.num_dense_layers
    for number, experts in enumerate(layer_pattern(4, freq)):
        block, i = divmod(number - first, size)
        layers = params["layers"] if size == 1 else params["layers"].get(f"layer_{i}")
        layer = params.get(f"dense_{number}") or jax.tree.map(lambda a, b=block: a[b], layers)
        assert set(layer) & {"moe", "mlp"} == {"moe" if experts else "mlp"}
        expected = jax.tree.map(lambda a, n=number: a[n], plain["layers"]["attention"])
        jax.tree.map(np.testing.assert_array_equal, layer["attention"], expected)
    assert sum(math.prod(a.shape) for a in jax.tree.leaves(params)) == parameter_count(config)


def test_a_layer_without_experts_costs_its_mlp_alone() -> None:
    """Gated, so three matrices: 16 x 24 for the MLP, 2 of 8 experts of 16 x 8, a router 16 x 8."""
    every, second = (
        flops_per_token(model_config(num_layers=4, moe_layer_freq=n), 16) for n in (1, 2)
    )
    assert every.causal - second.causal == 6 * 2 * (3 * 16 * (2 * 8 - 24) + 16 * 8)
