from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.optimizer import make_optimizer

AXES = {"query": ("layers", "embed", "heads", "head_dim"), "norm": ("layers", "embed")}
SHAPES = {"query": (2, 6, 4, 2), "norm": (2, 6)}
CONFIG = OptimizerConfig(
    name="adafactor",
    lr=0.05,
    lr_decay_style="constant",
    weight_decay=0.3,
    adafactor_min_dim_size_to_factor=4,
)


def random_tree(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    # layers of very different gradients, to see that they do not mix
    return {n: rng.normal(size=s) * np.array([1.0, 30.0]).reshape(2, *[1] * (len(s) - 1))
            for n, s in SHAPES.items()}  # fmt: skip


def run(config: OptimizerConfig, steps: int) -> tuple[Any, Any]:
    optimizer = make_optimizer(config, total_steps=steps, logical_axes=AXES)
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), random_tree(0))
    state = jax.jit(optimizer.init)(params)
    update = jax.jit(optimizer.update)
    for step in range(steps):
        grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), random_tree(1 + step))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_stacked_layers_train_as_their_matrices_do_in_torch():
    torch = pytest.importorskip("torch")
    got, _ = run(CONFIG, 8)
    start, moved = random_tree(0), 0.0
    for name in SHAPES:
        for layer in range(2):
            flat = start[name][layer].reshape(6, -1) if name == "query" else start[name][layer]
            parameter = torch.nn.Parameter(torch.tensor(flat))
            reference = torch.optim.Adafactor(
                [parameter], lr=0.05, weight_decay=0.3 if name == "query" else 0.0
            )
            for step in range(8):
                grad = random_tree(1 + step)[name][layer].reshape(flat.shape)
                parameter.grad = torch.tensor(grad)
                reference.step()
            ours = np.asarray(got[name][layer]).reshape(flat.shape)
            np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=2e-4, atol=1e-5)
            moved = max(moved, np.abs(ours - flat).max())
    assert moved > 0.5


def test_the_second_moment_of_a_matrix_is_its_row_and_column_means():
    _, state = run(CONFIG, 1)
    # decay is 1 - 1^-0.8 = 0 in the first step
    squares = random_tree(1)["query"].reshape(2, 6, 8) ** 2
    # [layers, matrices of a layer, size]
    moments = [np.asarray(x)[:, 0] for x in jax.tree.leaves(state[0]["query"]) if x.ndim == 3]
    means = [squares.mean(axis=1), squares.mean(axis=2)]
    for want in means:
        [got] = [m for m in moments if m.shape == want.shape]
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_without_the_scale_of_the_parameter_the_first_step_is_the_learning_rate():
    config = OptimizerConfig(
        name="adafactor",
        lr=0.05,
        lr_decay_style="constant",
        weight_decay=0.0,
        adafactor_scale_parameter=False,
    )
    got, _ = run(config, 1)
    start, grads = random_tree(0), random_tree(1)
    for name in SHAPES:  # unfactored: g / sqrt(g^2)
        want = start[name] - 0.05 * np.sign(grads[name])
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-5)
