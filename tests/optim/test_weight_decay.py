import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtron.errors import ConfigError
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.decay_mask import decay_mask
from jaxtron.optim.optimizer import find_factory, make_optimizer
from jaxtron.optim.weight_decay import weight_decay_schedule


def config_of(**changes) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 0.1, "lr_decay_style": "constant", **changes})


@pytest.mark.parametrize(
    ("style", "quarter"), [("linear", 0.25), ("cosine", (math.cos(0.75 * math.pi) + 1) / 2)]
)
def test_the_decay_grows_from_start_to_end(style: str, quarter: float):
    decay = weight_decay_schedule(
        config_of(weight_decay_incr_style=style, start_weight_decay=0.1, end_weight_decay=0.5),
        total_steps=20,
    )
    for step, share in {0: 0.0, 5: quarter, 10: 0.5, 20: 1.0, 30: 1.0}.items():
        assert float(decay(step)) == pytest.approx(0.1 + 0.4 * share, rel=1e-6), step


def test_a_constant_decay_is_a_number():
    assert weight_decay_schedule(config_of(weight_decay=0.3), total_steps=9) == 0.3


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor", "muon"])
def test_every_optimizer_decays_by_the_schedule(name: str):
    config = config_of(
        name=name,
        weight_decay_incr_style="linear",
        start_weight_decay=0.0,
        end_weight_decay=0.4,
        sgd_momentum=0.0,
    )
    axes = {"w": ("embed", "mlp"), "norm": ("embed",)}
    optimizer = make_optimizer(config, total_steps=4, logical_axes=axes)
    params = {"w": jnp.full((2, 3), 2.0), "norm": jnp.full(2, 2.0)}
    state = optimizer.init(params)
    want = 2.0
    for decay in (0.0, 0.1, 0.2):  # zero gradients: nothing but decay moves the weights
        zeros = {"w": jnp.zeros((2, 3)), "norm": jnp.zeros(2)}
        updates, state = optimizer.update(zeros, state, params)
        params = optax.apply_updates(params, updates)
        want *= 1 - 0.1 * decay
        np.testing.assert_allclose(params["w"], want, rtol=1e-6)
    np.testing.assert_array_equal(params["norm"], 2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_weight_decay": 0.1}, "start_weight_decay=0.1 without a change"),
        ({"weight_decay_incr_style": "linear"}, "needs .*start_weight_decay and .*end_weight"),
        (
            {
                "weight_decay_incr_style": "cosine",
                "start_weight_decay": 0.2,
                "end_weight_decay": 0.1,
            },
            "end_weight_decay=0.1 is less",
        ),
    ],
)
def test_contradicting_keys_are_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        find_factory(config_of(**changes))


def test_norms_of_query_and_key_decay_only_when_asked():
    axes = {
        "query_norm": {"weight": ("layers", "head_dim"), "bias": ("layers", "head_dim")},
        "key_norm": {"weight": ("layers", "head_dim")},
        "input_norm": {"weight": ("layers", "embed")},
    }
    off = {
        "query_norm": {"weight": False, "bias": False},
        "key_norm": {"weight": False},
        "input_norm": {"weight": False},
    }
    on = {**off, "query_norm": {"weight": True, "bias": False}, "key_norm": {"weight": True}}
    assert decay_mask(axes) == off
    assert decay_mask(axes, qk_layernorm=True) == on
    optimizer = make_optimizer(
        config_of(apply_wd_to_qk_layernorm=True, weight_decay=0.5),
        total_steps=1,
        logical_axes={"query_norm": {"weight": ("layers", "head_dim")}},
    )
    params = {"query_norm": {"weight": jnp.ones((1, 2))}}
    zeros = {"query_norm": {"weight": jnp.zeros((1, 2))}}
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["query_norm"]["weight"], -0.05)
