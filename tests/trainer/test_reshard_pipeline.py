"""Checkpoints have the layers in the model's order, whatever the order on a pipeline (O13)."""

import numpy as np
import pytest

from tests.trainer.runs import (
    assert_bitwise,
    gathered,
    make_config,
    make_trainer,
    saved_state,
    steps,
    train,
)

RAW = {
    "model": {"num_layers": 6},
    "train": {"num_microbatches": 4},
}
INTERLEAVED = {
    "pipeline": 2,
    "virtual_pipeline": 2,
    "pipeline_schedule": "interleaved",
    "pipeline_layout": "Ett|t|tt|tL",
    "fsdp": 1,
}
UNEVEN = {"pipeline": 4, "fsdp": 2, "pipeline_layout": "Et|tt|tt|tL"}
ONE = {"fsdp": 1}


def sections(parallel, **more):
    return {**RAW, "parallel": parallel, "train": {**RAW["train"], **more}}


@pytest.mark.parametrize(
    "meshes",
    [(INTERLEAVED, ONE, INTERLEAVED), (ONE, UNEVEN, INTERLEAVED)],
    ids=["interleaved, one, interleaved", "one, uneven, interleaved"],
)
def test_a_run_moves_between_pipelines_and_one_device(tmp_path, meshes):
    train(tmp_path / "whole", **sections(ONE))
    expected = [record["loss"] for record in steps(tmp_path / "whole")]
    train(tmp_path / "moved", **sections(meshes[0], exit_interval=1))
    for step, mesh in enumerate(meshes[1:], start=1):
        reader = make_trainer(make_config(tmp_path / "moved", **sections(ONE)))
        saved = saved_state(tmp_path / "moved", reader, step)
        trainer = make_trainer(make_config(tmp_path / "moved", **sections(mesh)))
        state, start, _ = trainer._start()
        assert start == step
        assert_bitwise(gathered(trainer.program.to_logical(state)), saved)
        train(tmp_path / "moved", **sections(mesh, exit_interval=1))
    losses = [record["loss"] for record in steps(tmp_path / "moved")]
    np.testing.assert_allclose(losses, expected[:3], rtol=1e-6)
