"""The state of every optimizer, saved on eight devices, comes back bitwise on two and on one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.mesh.axes import AXES
from jaxtron.mesh.mesh import make_mesh
from jaxtron.mesh.rules import make_rules
from jaxtron.models.config import ModelConfig
from jaxtron.models.decoder import Decoder
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.optimizer import OPTIMIZERS, make_optimizer
from jaxtron.parallel.param_layout import is_layout, param_layouts
from jaxtron.parallel.state_sharding import optimizer_state_shardings

MODEL = Decoder(
    ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=4,
        ffn_hidden_size=32,
        vocab_size=64,
        make_vocab_size_divisible_by=8,
        max_position_embeddings=16,
    )
)
KEYS: dict[str, dict[str, Any]] = {
    "adamw": {"exp_avg_dtype": "bf16"},
    "adafactor": {"adafactor_min_dim_size_to_factor": 16},
    "muon": {"decoupled_lr": 0.05, "decoupled_min_lr": 0.0},
}


def abstract_state(name: str, **axes: int) -> Any:
    """Optimizer state on a mesh, as shapes with shardings."""
    sizes = {axis: axes.get(axis, 1) for axis in AXES}
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    layouts = param_layouts(
        MODEL.shapes, MODEL.logical, make_rules({}, sizes), "optim_grads_params", jnp.float32
    )
    shardings = jax.tree.map(
        lambda lay: NamedSharding(mesh, lay.stored_spec), layouts, is_leaf=is_layout
    )
    config = OptimizerConfig(name=name, lr=0.1, **KEYS.get(name, {}))
    optimizer = make_optimizer(config, total_steps=4, logical_axes=MODEL.logical)
    shapes = jax.eval_shape(optimizer.init, MODEL.shapes)
    placed = optimizer_state_shardings(shapes, MODEL.shapes, shardings)
    return {
        "opt_state": jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            placed,
        )
    }


def drawn(abstract: Any) -> Any:
    """Arrays whose every element differs from its neighbours."""
    rng = np.random.default_rng(5)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.integers(1, 2**15, leaf.shape)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(draw, abstract)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_round_trip(name: str, tmp_path) -> None:
    saved = drawn(abstract_state(name, fsdp=2, tensor=4))
    split = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(saved))
    # moments of the matrices are sharded; factored ones are small and replicated
    assert split >= 5 or name == "adafactor"
    with Checkpointer(CheckpointConfig(dir=str(tmp_path), async_save=False)) as checkpointer:
        checkpointer.save(1, saved, {})
        checkpointer.wait()
        for axes in ({"tensor": 2}, {}):
            restored, _ = checkpointer.restore(1, abstract_state(name, **axes))
            assert jax.tree.structure(restored) == jax.tree.structure(saved)
            for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
                assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
