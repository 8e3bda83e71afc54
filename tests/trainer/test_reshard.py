"""A run goes on where it stopped on any other mesh (O13).

Checkpoints have the layers in the model's order, whatever the order on a pipeline: its stages here
have different numbers of layers.
"""

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

# Dropout: the loss after the move is that of the run that stayed only if its masks go on too.
DENSE = {"model": {"hidden_dropout": 0.1, "num_layers": 6}}
DENSE_MESHES = {
    **MESHES,
    "tensor 2 x pipeline 4": {"tensor": 2, "pipeline": 4, "pipeline_layout": "Et|tt|tt|tL"},
    "pipeline 2 x context 2 x data 2": {"pipeline": 2, "context": 2, "data": 2},
    "pipeline 2, interleaved": {
        "pipeline": 2,
        "virtual_pipeline": 2,
        "pipeline_schedule": "interleaved",
        "pipeline_layout": "Ett|t|tt|tL",
    },
    "pipeline 4, interleaved": {
        "pipeline": 4,
        "virtual_pipeline": 2,
        "pipeline_schedule": "interleaved",
        "pipeline_layout": "E|t|t|t|t|t|t|L",
    },
}
MIXTURE = {
    "model": {
        "num_layers": 2,
        "hidden_dropout": 0.1,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_aux_loss_coeff": 0.05,
    }
}
MIXTURE_MESHES = {
    "1 device": {},
    "expert 4 x data 2": {"expert": 4, "data": 2},
    "expert 2 x tensor 2 x pipeline 2": {"expert": 2, "tensor": 2, "pipeline": 2},
    "fsdp 8": {"fsdp": 8},
}
# One step on each mesh: from few devices to many and back, and every axis comes and goes.
DENSE_WAY = [
    "pipeline 2, interleaved",
    "data 2 x fsdp 2 x tensor 2",
    "tensor 2 x pipeline 4",
    "pipeline 2 x context 2 x data 2",
    "1 device",
    "pipeline 4, interleaved",
    "1 device",
]
MIXTURE_WAY = [*MIXTURE_MESHES, "1 device"]


def sections(model, mesh, **more):
    """Of a run on a mesh; a pipeline has as many microbatches as stages."""
    microbatches = {"num_microbatches": mesh["pipeline"]} if "pipeline" in mesh else {}
    parallel = {**mesh, "fsdp": mesh.get("fsdp", 1)}
    train = {"steps": 8, **microbatches, **more}
    return {**model, "parallel": parallel, "train": train, "optimizer": {"lr_decay_steps": 8}}


def losses(folder):
    return [record["loss"] for record in steps(folder)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses of the eight steps on one device, by kind of model."""
    result = {}
    for name, model in (("dense", DENSE), ("mixture", MIXTURE)):
        folder = tmp_path_factory.mktemp(name)
        train(folder, **sections(model, {}))
        result[name] = losses(folder)
    return result


def go_on(folder, model, mesh, step, expected):
    """Resume a run of ``step`` steps elsewhere, compare what it restores, train one step."""
    here = sections(model, mesh, exit_interval=1)
    saved = saved_state(folder, make_trainer(make_config(folder, **sections(model, {}))), step)
    trainer = make_trainer(make_config(folder, **here))
    state, start, consumed = trainer._start()
    assert_bitwise(gathered(trainer.program.to_logical(state)), saved)
    assert (start, consumed) == (step, step * BATCH)
    assert (int(state["step"]), int(state["updates"])) == (step, step)
    for name, array in gathered(state["opt_state"]).items():
        assert array.any(), name  # moments and counts, not a fresh optimizer

    del state
    train(folder, **here)
    record = steps(folder)[step]
    assert record["step"] == step + 1
    assert record["consumed_samples"] == (step + 1) * BATCH
    np.testing.assert_allclose(record["loss"], expected[step], rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "model", "meshes", "way"),
    [
        ("dense", DENSE, DENSE_MESHES, DENSE_WAY),
        ("mixture", MIXTURE, MIXTURE_MESHES, MIXTURE_WAY),
    ],
    ids=["dense", "mixture of experts"],
)
def test_a_run_moves_from_mesh_to_mesh(tmp_path, uninterrupted, kind, model, meshes, way):
    train(tmp_path, **sections(model, meshes[way[0]], exit_interval=1))
    for step, mesh in enumerate(way[1:], start=1):
        go_on(tmp_path, model, meshes[mesh], step, uninterrupted[kind])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model", "before", "after"),
    [
        (kind, model, meshes[before], meshes[after])
        for kind, model, meshes, way in (
            ("dense", DENSE, DENSE_MESHES, DENSE_WAY),
            ("mixture", MIXTURE, MIXTURE_MESHES, MIXTURE_WAY),
        )
        for before, after in itertools.permutations(meshes, 2)
        if (before, after) not in itertools.pairwise(way)
    ],
)
def test_a_run_moves_between_any_two_meshes(tmp_path, uninterrupted, kind, model, before, after):
    train(tmp_path, **sections(model, before, exit_interval=2))
    go_on(tmp_path, model, after, 2, uninterrupted[kind])


LOOPS = [
    {"layer_loop": "scan", "num_microbatches": 1},
    {"layer_loop": "unroll", "num_microbatches": 4},
]


@pytest.mark.parametrize(("before", "after"), [LOOPS, LOOPS[::-1]], ids=["unroll", "scan"])
def test_layer_loop_and_microbatches_may_change(tmp_path, uninterrupted, before, after):
    train(tmp_path, **sections(DENSE, {}, **before, exit_interval=2))
    train(tmp_path, **sections(DENSE, {}, **after, exit_interval=1))
    np.testing.assert_allclose(losses(tmp_path), uninterrupted["dense"][:3], rtol=1e-6)
