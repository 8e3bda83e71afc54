"""The state of every optimizer, saved on eight devices, comes back bitwise on two and on one."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.optimizer import OPTIMIZERS, make_optimizer
from tests.optim.small_decoder import abstract_state, parameter_shardings, small_decoder

MODEL = small_decoder()
KEYS: dict[str, dict[str, Any]] = {
    "adamw": {"exp_avg_dtype": "bf16"},
    "adafactor": {"adafactor_min_dim_size_to_factor": 16},
    "muon": {"decoupled_lr": 0.05, "decoupled_min_lr": 0.0},
}


def state_on(name: str, **axes: int) -> Any:
    """Optimizer state on a mesh, as shapes with shardings."""
    config = OptimizerConfig(name=name, lr=0.1, **KEYS.get(name, {}))
    optimizer = make_optimizer(config, total_steps=4, logical_axes=MODEL.logical)
    return {"opt_state": abstract_state(optimizer, MODEL, parameter_shardings(MODEL, **axes))}


def drawn(abstract: Any) -> Any:
    """Arrays whose every element differs from its neighbours."""
    rng = np.random.default_rng(5)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.integers(1, 2**15, leaf.shape)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(draw, abstract)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_round_trip(name: str, tmp_path) -> None:
    saved = drawn(state_on(name, fsdp=2, tensor=4))
    split = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(saved))
    # moments of the matrices are sharded; factored ones are small and replicated
    assert split >= 5 or name == "adafactor"
    with Checkpointer(CheckpointConfig(dir=str(tmp_path), async_save=False)) as checkpointer:
        checkpointer.save(1, saved, {})
        checkpointer.wait()
        for axes in ({"tensor": 2}, {}):
            restored, _ = checkpointer.restore(1, state_on(name, **axes))
            assert jax.tree.structure(restored) == jax.tree.structure(saved)
            for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
                assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
