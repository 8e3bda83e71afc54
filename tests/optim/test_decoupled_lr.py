import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtron.errors import ConfigError
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.optimizer import make_optimizer
from jaxtron.optim.schedule import check_schedule

AXES = {
    "embedding": {"word": ("vocab", "embed"), "position": ("position", "embed")},
    "layers": {"up": ("layers", "embed", None, "mlp"), "up_bias": ("layers", None, "mlp")},
    "output": {"weight": ("vocab", "embed")},
}
SHAPES = {
    "embedding": {"word": (7, 4), "position": (5, 4)},
    "layers": {"up": (2, 4, 2, 6), "up_bias": (2, 2, 6)},
    "output": {"weight": (7, 4)},
}


def random_tree(seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def train(**changes):
    config = OptimizerConfig(
        **{"lr_decay_style": "linear", "lr_warmup_steps": 2, "weight_decay": 0.3, **changes}
    )
    optimizer = make_optimizer(config, total_steps=6, logical_axes=AXES)
    params = random_tree(0)
    state = jax.jit(optimizer.init)(params)
    update = jax.jit(optimizer.update)
    for step in range(4):
        updates, state = update(random_tree(1 + step), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor", "muon"])
def test_embedding_and_output_train_as_in_a_run_with_their_learning_rate(name: str):
    both = train(name=name, lr=0.1, min_lr=0.01, decoupled_lr=0.02, decoupled_min_lr=0.005)
    large, small = train(name=name, lr=0.1, min_lr=0.01), train(name=name, lr=0.02, min_lr=0.005)
    want = {
        "embedding": {
            "word": small["embedding"]["word"],
            "position": large["embedding"]["position"],
        },
        "layers": large["layers"],
        "output": small["output"],
    }
    # Muon's iteration enlarges the rounding of programs that are compiled apart.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), both, want)
    assert np.abs(large["output"]["weight"] - small["output"]["weight"]).max() > 0.01


def test_without_its_own_the_smallest_learning_rate_is_min_lr():
    one = train(lr=0.1, min_lr=0.01, decoupled_lr=0.02)
    two = train(lr=0.1, min_lr=0.01, decoupled_lr=0.02, decoupled_min_lr=0.01)
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoupled_min_lr": 0.1}, "decoupled_min_lr=0.1 without"),
        ({"decoupled_lr": 0.1, "decoupled_min_lr": 0.2}, "decoupled_min_lr=0.2 is larger than"),
        ({"decoupled_lr": 0.1, "min_lr": 0.2}, "min_lr=0.2 is larger than .*decoupled_lr=0.1; set"),
        ({"decoupled_lr": 0.1, "lr_warmup_init": 0.3}, "lr_warmup_init=0.3 is larger than"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        check_schedule(OptimizerConfig(**{"lr": 1.0, **changes}), total_steps=10)


def outside_factory(config, schedule, decay_mask):
    def update(updates, state, params):
        lr = schedule(state)
        new = jax.tree.map(lambda g, decays: -lr * (g + decays), updates, decay_mask)
        return new, state + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def test_an_optimizer_from_another_package_gets_trees_of_its_group_alone(monkeypatch):
    module = types.ModuleType("outside_package")
    module.factory = outside_factory
    monkeypatch.setitem(sys.modules, "outside_package", module)
    config = OptimizerConfig(
        name="outside_package:factory", lr=0.1, lr_decay_style="constant", decoupled_lr=0.02
    )
    optimizer = make_optimizer(config, total_steps=1, logical_axes=AXES)
    params, grads = random_tree(0), random_tree(1)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    for part, leaf, lr, decays in (
        ("embedding", "word", 0.02, 1),
        ("embedding", "position", 0.1, 1),
        ("layers", "up_bias", 0.1, 0),
    ):
        want = -lr * (grads[part][leaf] + decays)
        np.testing.assert_allclose(updates[part][leaf], want, rtol=1e-6)
