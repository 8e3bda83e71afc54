"""optimizer.offload: moments lie in host memory, and nothing else changes.

The parameters here are updated whole; ``test_streamed.py`` cuts them in pieces.
"""

import jax
import numpy as np
import pytest

from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.forward import random_state


def program_of(offload: bool, name: str = "adamw") -> Program:
    config = make_config(
        model={"num_layers": 2},
        parallel={"fsdp": 2, "tensor": 2},
        train={"global_batch_size": 4},
        optimizer={"name": name, "lr": 0.01, "min_lr": 0.0, "clip_grad": 1.0, "offload": offload},
    )
    return Program(config, jax.devices()[:4])


def memory_kinds(state) -> set[tuple[bool, str]]:
    return {(leaf.ndim > 0, leaf.sharding.memory_kind) for leaf in jax.tree.leaves(state)}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_offloaded_moments_give_the_same_bits_and_stay_on_the_host(name: str, tmp_path) -> None:
    ends = []
    for offload in (False, True):
        program = program_of(offload, name)
        state = random_state(program)
        for step in range(3):
            batch = rows_of(program, make_batch(program.config, step))
            state, _ = program.train_step(state, batch)
        ends.append(state)
    plain, offloaded = ends
    device = jax.devices()[0].default_memory().kind
    assert memory_kinds(offloaded["opt_state"]) == {(True, "pinned_host"), (False, device)}
    assert {kind for _, kind in memory_kinds(offloaded["params"])} == {device}
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(offloaded), strict=True):
        assert np.array_equal(a, b)

    with Checkpointer(CheckpointConfig(dir=str(tmp_path), async_save=False)) as checkpointer:
        checkpointer.save(3, offloaded, {})
        checkpointer.wait()
        restored, _ = checkpointer.restore(3, program.abstract_state())
    assert memory_kinds(restored["opt_state"]) == memory_kinds(offloaded["opt_state"])
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(restored), strict=True):
        assert np.array_equal(a, b)
