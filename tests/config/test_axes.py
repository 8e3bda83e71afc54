"""Axis sizes from the configuration and the number of devices."""

import pytest

from jaxtron.errors import ConfigError
from jaxtron.mesh.axes import AXES, resolve_axes
from jaxtron.parallel.config import ParallelConfig


@pytest.mark.parametrize(
    "asked, devices, sizes",
    [
        ({}, 1, (1, 1, 1, 1, 1, 1)),
        ({}, 8, (1, 1, 8, 1, 1, 1)),
        ({"tensor": 4}, 8, (1, 1, 2, 1, 1, 4)),
        ({"data": -1, "fsdp": 2, "tensor": 2}, 16, (1, 4, 2, 1, 1, 2)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, (1, 2, 2, 1, 1, 2)),
        ({"tensor": -1, "fsdp": 1}, 6, (1, 1, 1, 1, 1, 6)),
        ({"pipeline": 8, "tensor": 8, "fsdp": 4}, 256, (8, 1, 4, 1, 1, 8)),
        ({"context": 2, "expert": 2}, 12, (1, 1, 3, 2, 2, 1)),
        ({"tensor": 8}, 8, (1, 1, 1, 1, 1, 8)),
    ],
)
def test_sizes(asked: dict[str, int], devices: int, sizes: tuple[int, ...]) -> None:
    resolved = resolve_axes(ParallelConfig(**asked), devices)
    assert tuple(resolved) == AXES
    assert tuple(resolved.values()) == sizes


@pytest.mark.parametrize(
    "asked, devices, words",
    [
        ({"tensor": 3}, 8, ["tensor 3", "8", "set parallel.tensor to 2 or 4"]),
        ({"tensor": 16}, 8, ["tensor 16", "set parallel.tensor to 8", "multiple of 16"]),
        ({"fsdp": 2, "tensor": 4}, 16, ["fsdp 2 × tensor 4 = 8", "16", "set parallel.fsdp to 4"]),
        ({"fsdp": 1}, 4, ["all axes 1", "4", "set parallel.fsdp to 4"]),
        ({"data": -1}, 8, ["parallel.data and parallel.fsdp", "-1"]),
        ({"tensor": 0}, 8, ["parallel.tensor is 0"]),
        ({"fsdp": -2}, 8, ["parallel.fsdp is -2"]),
        ({"fsdp": 1, "tensor": 8}, 4, ["tensor 8", "start on 8 devices"]),
    ],
)
def test_sizes_that_cannot_be(asked: dict[str, int], devices: int, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_axes(ParallelConfig(**asked), devices)
    for word in words:
        assert word in str(caught.value)
