from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtron.errors import ConfigError
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.muon import is_hidden_matrix
from jaxtron.optim.optimizer import make_optimizer
from tests.optim.test_newton_schulz import QUINTIC, on_singular_values


def run(config: OptimizerConfig, axes: Any, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    optimizer = make_optimizer(config, total_steps=len(grads), logical_axes=axes)
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    state = jax.jit(optimizer.init)(params)
    update = jax.jit(optimizer.update)
    for grad in grads:
        grad = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grad)
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def config_of(**changes: Any) -> OptimizerConfig:
    fields = {"name": "muon", "lr": 0.1, "lr_decay_style": "constant", "weight_decay": 0.5}
    return OptimizerConfig(**{**fields, "muon_fp32_matmul_prec": "highest", **changes})


SCALES = {
    "spectral": {"up": 8**0.5, "down": 8**0.5},
    "shape_scaling": {"up": 2**0.5, "down": 1.0},
    "unit_rms_norm": {"up": 2**0.5, "down": 0.5**0.5},
}


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mode", SCALES)
def test_steps_follow_momentum_singular_values_and_scale_in_numpy(mode: str, nesterov: bool):
    axes = {"up": ("layers", "embed", None, "mlp"), "down": ("layers", "mlp", "embed")}
    shapes = {"up": (2, 4, 2, 8), "down": (2, 8, 4)}
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    grads = [{n: rng.normal(size=s) for n, s in shapes.items()} for _ in range(3)]
    config = config_of(muon_scale_mode=mode, muon_nesterov=nesterov, muon_extra_scale_factor=0.2)
    got, _ = run(config, axes, start, grads)
    for name, x in start.items():
        momentum = np.zeros_like(x)
        for grad in (g[name] for g in grads):
            momentum = 0.95 * momentum + 0.05 * grad
            moving = 0.95 * momentum + 0.05 * grad if nesterov else momentum
            if name == "up":  # gate and up apart
                parts = [on_singular_values(moving[:, :, part], QUINTIC) for part in range(2)]
                direction = np.stack(parts, axis=2)
            else:
                direction = on_singular_values(moving, QUINTIC)
            x = x - 0.1 * (0.2 * SCALES[mode][name] * direction + 0.5 * x)
        np.testing.assert_allclose(got[name], x, atol=3e-5)


def test_it_agrees_with_torch_within_the_bfloat16_of_its_products():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    rng = np.random.default_rng(3)
    start, grads = rng.normal(size=(12, 20)), [rng.normal(size=(12, 20)) for _ in range(4)]
    # torch keeps [output, input], we keep [input, output]
    parameter = torch.nn.Parameter(torch.tensor(start.T.copy(), dtype=torch.float32))
    reference = torch.optim.Muon([parameter], lr=0.1, weight_decay=0.5, momentum=0.9)
    for grad in grads:
        parameter.grad = torch.tensor(grad.T.copy(), dtype=torch.float32)
        reference.step()
    config = config_of(
        muon_momentum=0.9,
        muon_nesterov=True,
        muon_scale_mode="shape_scaling",
        muon_coefficient_type="simple",
        muon_fp32_matmul_prec="medium",
    )
    got, _ = run(config, {"w": ("embed", "mlp")}, {"w": start}, [{"w": g} for g in grads])
    moved = np.abs(got["w"] - start).max()
    assert moved > 0.2
    np.testing.assert_allclose(got["w"], parameter.detach().numpy().T, atol=0.02 * moved)


def test_embeddings_output_vectors_and_biases_are_adamws():
    axes = {
        "word": ("vocab", "embed"),
        "position": ("position", "embed"),
        "norm": ("layers", "embed"),
        "bias": ("layers", "heads", "head_dim"),
        "router": ("layers", "router", "embed"),
        "query": ("layers", "embed", "heads", "head_dim"),
    }
    assert [name for name, a in axes.items() if is_hidden_matrix(a)] == ["router", "query"]
    shapes = {"word": (7, 4), "position": (5, 4), "norm": (2, 4), "bias": (2, 2, 3)}
    axes = {name: axes[name] for name in shapes}
    rng = np.random.default_rng(1)
    start = {n: rng.normal(size=s) for n, s in shapes.items()}
    grads = [{n: rng.normal(size=s) for n, s in shapes.items()} for _ in range(3)]
    by_muon, _ = run(config_of(), axes, start, grads)
    by_adamw, _ = run(config_of(name="adamw"), axes, start, grads)
    jax.tree.map(np.testing.assert_array_equal, by_muon, by_adamw)


def test_the_state_holds_one_moment_of_hidden_matrices_and_two_of_others():
    axes = {"word": ("vocab", "embed"), "up": ("layers", "embed", None, "mlp")}
    params = {"word": np.zeros((7, 4)), "up": np.zeros((2, 4, 2, 8))}
    _, state = run(config_of(), axes, params, [params])
    moments = sorted(x.shape for x in jax.tree.leaves(state) if x.ndim)
    assert moments == [(2, 4, 2, 8), (7, 4), (7, 4)]


def test_a_cut_series_of_coefficients_is_refused():
    with pytest.raises(ConfigError, match=r"muon_num_ns_steps=6 is not a multiple of the 5"):
        make_optimizer(config_of(muon_num_ns_steps=6), total_steps=1, logical_axes={})
    config = config_of(muon_num_ns_steps=6, muon_coefficient_type="simple")
    make_optimizer(config, total_steps=1, logical_axes={})
