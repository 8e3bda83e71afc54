"""optimizer.offload: moments lie in host memory, and nothing else changes."""

import jax
import numpy as np
import pytest

from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.optim import streamed
from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.forward import random_state

LAYOUTS = {
    "fsdp-tensor": {"fsdp": 2, "tensor": 2},
    "interleaved": {
        "pipeline": 2,
        "tensor": 2,
        "virtual_pipeline": 2,
        "pipeline_schedule": "interleaved",
    },
    "uneven": {"pipeline": 2, "fsdp": 2, "pipeline_layout": "Ettt|tL"},
}


def program_of(offload: bool, name: str = "adamw", layout: str = "fsdp-tensor") -> Program:
    config = make_config(
        model={"num_layers": 4},
        parallel=LAYOUTS[layout],
        train={"global_batch_size": 4, "num_microbatches": 2},
        optimizer={"name": name, "lr": 0.01, "min_lr": 0.0, "clip_grad": 1.0, "offload": offload},
    )
    return Program(config, jax.devices()[:4])


def memory_kinds(state) -> set[tuple[bool, str]]:
    return {(leaf.ndim > 0, leaf.sharding.memory_kind) for leaf in jax.tree.leaves(state)}


@pytest.mark.parametrize(
    ("name", "layout", "pieces"),
    [
        ("adamw", "fsdp-tensor", False),
        ("muon", "fsdp-tensor", False),
        ("adamw", "interleaved", True),
        ("adamw", "uneven", False),
    ],
)
def test_offloaded_moments_give_the_same_weights_and_stay_on_the_host(
    name: str, layout: str, pieces: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits where parameters are updated whole; and after a checkpoint."""
    if pieces:  # every stage goes by the layer, and tables by a few rows
        monkeypatch.setattr(streamed, "PIECE_BYTES", 100)
    ends = []
    for offload in (False, True):
        program = program_of(offload, name, layout)
        state = program.from_logical(random_state(program))
        for step in range(3):
            batch = rows_of(program, make_batch(program.config, step))
            state, _ = program.train_step(state, batch)
        ends.append(state)
    plain, offloaded = ends
    device = jax.devices()[0].default_memory().kind

    def check(expected, state) -> None:
        assert memory_kinds(state["opt_state"]) == {(True, "pinned_host"), (False, device)}
        assert {kind for _, kind in memory_kinds(state["params"])} == {device}
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(state), strict=True):
            if pieces:  # an update is about 1e-2; AdamW's division amplifies rounding
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-4)
            else:
                assert np.array_equal(a, b)

    check(plain, offloaded)
    with Checkpointer(CheckpointConfig(dir=str(tmp_path), async_save=False)) as checkpointer:
        checkpointer.save(3, program.to_logical(offloaded), {})
        checkpointer.wait()
        restored, _ = checkpointer.restore(3, program.abstract_state())
    assert restored["params"]["layers"]["mlp"]["down"].shape[0] == 4
    check(plain, program.from_logical(restored))
