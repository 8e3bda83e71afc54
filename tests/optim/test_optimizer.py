import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtron.errors import ConfigError
from jaxtron.optim.clip import clip_by_global_norm
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.decay_mask import decay_mask
from jaxtron.optim.optimizer import make_optimizer
from jaxtron.optim.schedule import learning_rate_schedule

AXES = {
    "embedding": {"weight": ("vocab", "embed")},
    "layers": {
        "norm": {"weight": ("layers", "embed")},
        "qkv": {"weight": ("layers", "embed", "heads"), "bias": ("layers", "heads", "head_dim")},
    },
}
SHAPES = {
    "embedding": {"weight": (7, 4)},
    "layers": {
        "norm": {"weight": (2, 4)},
        "qkv": {"weight": (2, 4, 6), "bias": (2, 2, 3)},
    },
}
DECAYS = {
    "embedding": {"weight": True},
    "layers": {"norm": {"weight": False}, "qkv": {"weight": True, "bias": False}},
}


def is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def random_tree(seed: int, scale: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32),
        SHAPES,
        is_leaf=is_shape,
    )


def gradients(step: int) -> Any:
    # scales of 0.02 to 5, so that some steps are clipped and others are not
    return random_tree(100 + step, scale=(0.02, 5.0, 0.1)[step % 3])


def test_vectors_and_biases_do_not_decay():
    assert decay_mask(AXES) == DECAYS


def test_the_stacked_layers_axis_makes_no_matrix_and_an_unstacked_bias_is_one_by_name():
    mask = decay_mask(
        {
            "a": {"weight": ("embed",), "expert_bias": ("expert", "mlp")},
            "router": ("layers", "router", "embed"),
            "scalar": (),
        }
    )
    assert mask == {
        "a": {"weight": False, "expert_bias": False},
        "router": True,
        "scalar": False,
    }


def train(config: OptimizerConfig, steps: int) -> tuple[Any, Any]:
    optimizer = make_optimizer(config, total_steps=steps, logical_axes=AXES)
    params = random_tree(0)
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, grads):
        grads, _ = clip_by_global_norm(grads, config.clip_grad)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        params, state = update(params, state, gradients(step))
    return params, state


CONFIGS = {
    "adamw": OptimizerConfig(lr=0.03, min_lr=0.003, lr_warmup_steps=5, weight_decay=0.3),
    "sgd": OptimizerConfig(name="sgd", lr=0.3, lr_decay_style="linear", weight_decay=0.3),
    "sgd without momentum": OptimizerConfig(name="sgd", lr=0.3, sgd_momentum=0.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_twenty_steps_equal_the_same_training_in_torch(name: str):
    torch = pytest.importorskip("torch")
    config = CONFIGS[name]
    lr = learning_rate_schedule(config, total_steps=20)
    params = jax.tree.map(
        lambda x: torch.nn.Parameter(torch.tensor(np.array(x, np.float64))), random_tree(0)
    )
    leaves, decays = jax.tree.leaves(params), jax.tree.leaves(DECAYS)
    groups = [
        {"params": [p for p, d in zip(leaves, decays) if d], "weight_decay": config.weight_decay},
        {"params": [p for p, d in zip(leaves, decays) if not d], "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    else:
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=config.sgd_momentum)
    for step in range(20):
        for parameter, grad in zip(leaves, jax.tree.leaves(gradients(step))):
            parameter.grad = torch.tensor(np.array(grad, np.float64))
        torch.nn.utils.clip_grad_norm_(leaves, config.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = float(lr(step))
        optimizer.step()
    ours, _ = train(config, 20)
    start = jax.tree.leaves(random_tree(0))
    for got, want, before in zip(jax.tree.leaves(ours), leaves, start):
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=2e-5, atol=2e-6)
        assert np.abs(got - before).max() > 0.05  # the comparison is of something that moved


def test_two_steps_of_adamw_by_hand():
    config = OptimizerConfig(lr=0.1, lr_decay_style="constant", weight_decay=0.5, clip_grad=0.0)
    optimizer = make_optimizer(config, total_steps=2, logical_axes={"w": ("embed", "mlp")})
    w, m, v = 2.0, 0.0, 0.0
    params = {"w": jnp.array([[w]])}
    state = optimizer.init(params)
    for t, grad in enumerate((0.4, -1.0), start=1):
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        w = w * (1 - 0.1 * 0.5) - 0.1 * step
        updates, state = optimizer.update({"w": jnp.array([[grad]])}, state, params)
        params = optax.apply_updates(params, updates)
    assert float(params["w"][0, 0]) == pytest.approx(w, rel=1e-6)


def test_the_first_update_of_a_warm_up_uses_the_initial_learning_rate():
    params, _ = train(OptimizerConfig(lr=1.0, lr_decay_style="constant", lr_warmup_steps=4), 1)
    jax.tree.map(np.testing.assert_array_equal, params, random_tree(0))


@pytest.mark.parametrize("name", CONFIGS)
def test_state_is_float32_like_the_parameters_or_an_int32_count(name: str):
    _, state = train(CONFIGS[name], 6)
    shapes = [x.shape for x in jax.tree.leaves(random_tree(0))]
    leaves = jax.tree.leaves(state)
    counts = [x for x in leaves if x.shape == ()]
    assert counts and all(x.dtype == jnp.int32 and x == 6 for x in counts)
    moments = [x for x in leaves if x.shape != ()]
    assert all(x.dtype == jnp.float32 for x in moments)
    assert [x.shape for x in moments] == shapes * {"adamw": 2, "sgd": 1}.get(name, 0)


def outside_factory(config, schedule, decay_mask, *, power=1.0):
    def update(updates, state, params):
        lr = schedule(state)
        new = jax.tree.map(
            lambda g, d: -lr * (jnp.sign(g) * jnp.abs(g) ** power + d), updates, decay_mask
        )
        return new, state + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def test_an_optimizer_from_another_package_is_named_by_its_import_path(monkeypatch):
    module = types.ModuleType("outside_package")
    module.factory = outside_factory
    module.number = 3
    monkeypatch.setitem(sys.modules, "outside_package", module)
    config = OptimizerConfig(
        name="outside_package:factory",
        options={"power": 2.0},
        lr=0.5,
        lr_decay_style="constant",
        clip_grad=0.0,
    )
    params, state = train(config, 1)
    assert state == 1
    before, grads = random_tree(0), gradients(0)
    for path in (("embedding", "weight"), ("layers", "norm", "weight")):
        got, start, grad, decays = params, before, grads, DECAYS
        for part in path:
            got, start, grad, decays = got[part], start[part], grad[part], decays[part]
        want = start - 0.5 * (jnp.sign(grad) * grad**2 + decays)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    bad = OptimizerConfig(name="outside_package:number", lr=0.1)
    with pytest.raises(ConfigError, match="is a int, not a function"):
        make_optimizer(bad, total_steps=1, logical_axes=AXES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "adam"}, "'adam'.*one of adamw, sgd, lion, adafactor, muon or module"),
        ({"name": "no_such_package:thing"}, "cannot be imported.*no_such_package"),
        ({"name": "math:thing"}, "cannot be imported.*thing"),
        ({"name": "adamw", "options": {"power": 1}}, "options has power.*adamw takes none"),
    ],
)
def test_an_optimizer_that_does_not_exist_is_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(OptimizerConfig(lr=0.1, **changes), total_steps=1, logical_axes=AXES)


def test_a_bfloat16_first_moment_halves_its_bytes_and_hardly_changes_training():
    changes = {"lr": 0.03, "lr_decay_style": "constant", "weight_decay": 0.3}
    full, _ = train(OptimizerConfig(**changes), 10)
    half, state = train(OptimizerConfig(**changes, exp_avg_dtype="bf16"), 10)
    adam = state[0]
    assert {x.dtype.name for x in jax.tree.leaves(adam.mu)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(adam.nu)} == {"float32"}
    for a, b, start in zip(*map(jax.tree.leaves, (full, half, random_tree(0)))):
        moved = np.abs(a - start).max()
        # eight bits of mantissa: each stored moment is off by at most 2^-9
        assert 0 < np.abs(a - b).max() < 0.02 * moved


def test_a_moment_dtype_for_another_optimizer_is_refused():
    config = OptimizerConfig(name="lion", lr=0.1, exp_avg_dtype="bf16")
    with pytest.raises(ConfigError, match=r"exp_avg_dtype=bf16 is for optimizer.name=adamw"):
        make_optimizer(config, total_steps=1, logical_axes=AXES)


def test_offload_without_a_moment_is_refused():
    config = OptimizerConfig(name="sgd", lr=0.1, sgd_momentum=0.0, offload=True)
    with pytest.raises(ConfigError, match="set optimizer.offload to false"):
        make_optimizer(config, total_steps=1, logical_axes=AXES)
