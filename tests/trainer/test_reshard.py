"""A run goes on where it stopped on any other mesh (O13)."""

import itertools

import numpy as np
import pytest

from tests.trainer.runs import (
    BATCH,
    MESHES,
    assert_bitwise,
    gathered,
    make_config,
    make_trainer,
    saved_state,
    steps,
    train,
)

SAMPLED = [
    ("1 device", "fsdp 8"),
    ("fsdp 8", "tensor 8"),
    ("tensor 8", "data 2 x fsdp 2 x tensor 2"),
    ("data 2 x fsdp 2 x tensor 2", "data 8"),
    ("data 8", "1 device"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses of the six steps on one device."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(folder)
    return [record["loss"] for record in steps(folder)]


def go_on(folder, before, after, step, uninterrupted):
    """Resume a run of ``step`` steps elsewhere, compare what it restores, train one step."""
    reader = make_trainer(make_config(folder, **before))
    saved = saved_state(folder, reader, step)
    trainer = make_trainer(make_config(folder, **after))
    trainer.config = make_config(folder, **after, train={"exit_interval": 1})
    state, start, consumed = trainer._start()
    assert_bitwise(gathered(state), saved)
    assert (start, consumed) == (step, step * BATCH)
    assert (int(state["step"]), int(state["updates"])) == (step, step)
    for array in gathered(state["opt_state"]).values():
        assert array.any()  # moments and counts, not a fresh optimizer

    del state
    train(folder, **after, train={"exit_interval": 1})
    record = steps(folder)[step]
    assert record["step"] == step + 1
    assert record["consumed_samples"] == (step + 1) * BATCH
    np.testing.assert_allclose(record["loss"], uninterrupted[step], rtol=1e-6)


def test_a_run_moves_from_mesh_to_mesh(tmp_path, uninterrupted):
    """One step on each mesh, around a ring of five."""
    train(tmp_path, parallel=MESHES[SAMPLED[0][0]], train={"exit_interval": 1})
    for step, (before, after) in enumerate(SAMPLED, start=1):
        go_on(
            tmp_path,
            {"parallel": MESHES[before]},
            {"parallel": MESHES[after]},
            step,
            uninterrupted,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), sorted(set(itertools.permutations(MESHES, 2)) - set(SAMPLED))
)
def test_a_run_moves_between_any_two_meshes(tmp_path, uninterrupted, before, after):
    train(tmp_path, parallel=MESHES[before], train={"exit_interval": 2})
    go_on(tmp_path, {"parallel": MESHES[before]}, {"parallel": MESHES[after]}, 2, uninterrupted)


LOOPS = [
    {"layer_loop": "scan", "num_microbatches": 1},
    {"layer_loop": "unroll", "num_microbatches": 4},
]


@pytest.mark.parametrize(("before", "after"), [LOOPS, LOOPS[::-1]], ids=["unroll", "scan"])
def test_layer_loop_and_microbatches_may_change(tmp_path, uninterrupted, before, after):
    train(tmp_path, train={**before, "exit_interval": 2})
    train(tmp_path, train={**after, "exit_interval": 1})
    losses = [record["loss"] for record in steps(tmp_path)]
    np.testing.assert_allclose(losses, uninterrupted[:3], rtol=1e-6)
