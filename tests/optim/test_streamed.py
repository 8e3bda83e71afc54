"""The streamed update of moments on the host is the update of whole trees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtron.errors import ConfigError
from jaxtron.optim import streamed
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.optimizer import ROWS_APART, make_optimizer
from jaxtron.optim.streamed import StreamedUpdate
from jaxtron.parallel.state_sharding import moments_on_host, optimizer_state_shardings

AXES = {
    "embedding": {"weight": ("vocab", "embed")},
    "dense_layers": {"mlp": {"weight": ("layers", "embed", None, "mlp")}},
    "layers": {
        "mlp": {"weight": ("layers", "embed", None, "mlp")},
        "norm": {"weight": ("layers", "embed")},
        "router": {"bias": ("layers", "expert")},
        "experts": {"up": ("layers", "experts", "embed", None, "expert_mlp")},
    },
    "final_norm": {"weight": ("embed",)},
}
SIZES = {
    "embedding": {"weight": (12, 8)},
    "dense_layers": {"mlp": {"weight": (2, 8, 2, 6)}},
    "layers": {
        "mlp": {"weight": (3, 8, 2, 6)},
        "norm": {"weight": (3, 8)},
        "router": {"bias": (3, 4)},
        "experts": {"up": (3, 4, 8, 2, 6)},
    },
    "final_norm": {"weight": (8,)},
}


def is_leaf(node: Any) -> bool:
    return isinstance(node, tuple)


def numbers(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda size: jnp.asarray(rng.standard_normal(size), jnp.float32), SIZES, is_leaf=is_leaf
    )


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stack goes by the layer, and the table by a few rows."""
    monkeypatch.setattr(streamed, "PIECE_BYTES", 100)


def run(config: OptimizerConfig, *, by_pieces: bool) -> tuple[Any, Any]:
    """Parameters and state after three steps, of which the second does not apply."""

    def build(axes: Any) -> optax.GradientTransformation:
        return make_optimizer(config, total_steps=10, logical_axes=axes)

    optimizer, params = build(AXES), numbers(0)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec())
    abstract = jax.eval_shape(optimizer.init, params)
    device = optimizer_state_shardings(abstract, params, jax.tree.map(lambda _: sharding, params))
    host = moments_on_host(abstract, device)
    update = StreamedUpdate(
        build,
        logical_axes=AXES,
        shapes=params,
        state=abstract,
        device=device,
        host=host,
        rows_apart=config.name in ROWS_APART,
    )

    def step(grads: Any, state: Any, params: Any, applies: jax.Array) -> tuple[Any, Any]:
        if by_pieces:
            return update(grads, state, params, applies)
        updates, new = optimizer.update(grads, state, params)
        new = optax.apply_updates(params, updates), new
        return jax.tree.map(lambda a, b: jnp.where(applies, a, b), new, (params, state))

    state = jax.jit(optimizer.init, out_shardings=host if by_pieces else device)(params)
    jitted = jax.jit(step, out_shardings=(None, host if by_pieces else device))
    for number in range(3):
        params, state = jitted(numbers(number + 1), state, params, jnp.bool_(number != 1))
    if by_pieces:
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim}
        assert kinds <= {"pinned_host"}
    return params, state


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "adamw"},
        {"name": "adamw", "decoupled_lr": 0.02, "exp_avg_dtype": "bf16"},
        {"name": "adamw", "weight_decay_incr_style": "linear"}
        | {"start_weight_decay": 0.01, "end_weight_decay": 0.1},
        {"name": "sgd"},
        {"name": "lion"},
        {"name": "muon"},
        {"name": "adafactor", "adafactor_min_dim_size_to_factor": 4},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_every_optimizer_gives_what_it_gives_on_whole_trees(keys: dict[str, Any]) -> None:
    config = OptimizerConfig(lr=0.01, lr_warmup_steps=2, **keys)
    whole, pieces = run(config, by_pieces=False), run(config, by_pieces=True)
    assert jax.tree.structure(whole) == jax.tree.structure(pieces)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(b, np.float32), np.asarray(a, np.float32), rtol=2e-5, atol=1e-6
        )


def flat(config: Any, schedule: Any, decay_mask: Any) -> optax.GradientTransformation:
    """An optimizer whose moments are one vector of all parameters."""
    return optax.flatten(optax.adam(schedule))


def test_an_optimizer_that_mixes_parameters_is_refused() -> None:
    config = OptimizerConfig(name="tests.optim.test_streamed:flat", lr=0.01)
    with pytest.raises(ConfigError, match=r"cannot be cut .* set optimizer.offload to false"):
        run(config, by_pieces=True)
