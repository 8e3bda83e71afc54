"""What a step is called where its compiler flags depend on it."""

import pytest

from jaxtron.config.load import load_config
from jaxtron.mesh.axes import AXES
from jaxtron.parallel.pipeline.layout import place_layers
from jaxtron.parallel.step_kinds import step_kinds
from tests.program.meshes import mesh_of


@pytest.mark.parametrize(
    "layout, given, expected",
    [
        ("fsdp=4", {}, []),
        ("fsdp=4", {"exchange": True}, ["exchange"]),
        ("tensor=2", {"in_parts": True}, ["permutations"]),
        ("tensor=4", {"in_parts": True}, ["permutations", "parts"]),
        ("tensor=4", {}, []),
        ("context=4 context_strategy=ring", {}, ["permutations"]),
        ("context=4 context_strategy=all_gather", {}, []),
        ("context=4 context_strategy=ring dynamic_context=true", {}, []),
        ("pipeline=2", {}, []),
        ("pipeline=2 virtual_pipeline=2 pipeline_schedule=interleaved", {}, ["branching"]),
    ],
)
def test_kinds(layout: str, given: dict[str, bool], expected: list[str]) -> None:
    config = load_config({"preset": "tiny"}, [f"parallel.{word}" for word in layout.split()])
    parallel = config.parallel
    sizes = {axis: max(1, getattr(parallel, axis)) for axis in AXES}
    placement = place_layers(
        config.model.num_layers, sizes["pipeline"], parallel.virtual_pipeline, None
    )
    facts = {"exchange": False, "in_parts": False, **given}
    assert step_kinds(config, mesh_of(4, **sizes), placement, **facts) == expected
