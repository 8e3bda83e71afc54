"""Where copy engines may do what a step exchanges."""

import pytest

from jaxtron.mesh.mesh import process_axis
from jaxtron.parallel.exchange import exchanges_in_process
from tests.program.meshes import mesh_of


@pytest.mark.parametrize(
    "per_process, sizes, expected",
    [
        (8, {"tensor": 8}, "tensor"),
        (4, {"tensor": 4, "fsdp": 2}, "tensor"),
        (4, {"tensor": 4, "pipeline": 2}, "tensor"),
        (8, {"tensor": 4, "fsdp": 2}, None),  # two groups in a process
        (2, {"tensor": 4, "fsdp": 2}, None),  # two processes in a group
        (1, {"tensor": 8}, None),
        (8, {"fsdp": 8}, "fsdp"),
        (4, {"data": 2, "fsdp": 4}, "fsdp"),
        (4, {"fsdp": 8}, None),
        (2, {"fsdp": 2, "expert": 2, "data": 2}, "expert"),
        (1, {}, None),
    ],
)
def test_the_axis_along_which_a_process_has_its_devices(
    per_process: int, sizes: dict[str, int], expected: str | None
) -> None:
    assert process_axis(mesh_of(per_process, **sizes)) == expected


@pytest.mark.parametrize(
    "sizes, kinds, expected",
    [
        ({"tensor": 4}, {"gradients"}, False),
        ({"fsdp": 4}, {"gradients"}, True),
        ({"fsdp": 4}, set(), False),
        ({"expert": 4}, {"gradients"}, True),
        ({"expert": 4}, {"gradients", "ragged"}, False),
        ({"context": 4}, {"gradients"}, False),
        ({"pipeline": 2, "fsdp": 4}, {"gradients"}, False),
        ({"fsdp": 2, "tensor": 2}, {"gradients"}, False),
    ],
)
def test_what_may_be_copied(sizes: dict[str, int], kinds: set[str], expected: bool) -> None:
    given = {kind: kind in kinds for kind in ("gradients", "ragged")}
    assert exchanges_in_process(mesh_of(4, **sizes), **given) is expected
