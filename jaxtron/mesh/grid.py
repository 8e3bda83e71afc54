"""Devices as points of the mesh: coordinates, groups along an axis, and what slice a point holds.

Plain arithmetic, so that it works for any number of devices on any machine. Devices are numbered in
mesh order, the last axis fastest, as :func:`jaxtron.mesh.mesh.make_mesh` arranges them.
"""

import math
from collections.abc import Mapping, Sequence

from jaxtron.mesh.axes import AXES


def stride(sizes: Mapping[str, int], axis: str) -> int:
    """Difference of the numbers of two neighbours along ``axis``."""
    return math.prod(sizes[a] for a in AXES[AXES.index(axis) + 1 :])


def coordinates(sizes: Mapping[str, int], device: int) -> dict[str, int]:
    """Position of a device on every axis."""
    return {axis: device // stride(sizes, axis) % sizes[axis] for axis in AXES}


def groups(sizes: Mapping[str, int], axis: str) -> list[range]:
    """The groups of devices that differ along ``axis`` alone, as ranges of device numbers."""
    step, size = stride(sizes, axis), sizes[axis]
    starts = [d for d in range(math.prod(sizes.values())) if d // step % size == 0]
    return [range(start, start + step * size, step) for start in starts]


def part(sizes: Mapping[str, int], axes: Sequence[str], point: Mapping[str, int]) -> int:
    """Which of the parts made by splitting over ``axes`` (first axis major) ``point`` holds."""
    number = 0
    for axis in axes:
        number = number * sizes[axis] + point[axis]
    return number


def parts(sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    """Number of parts that splitting over ``axes`` makes."""
    return math.prod(sizes[axis] for axis in axes)


def span(
    sizes: Mapping[str, int], axes: Sequence[str], point: Mapping[str, int], dim: int
) -> range:
    """Indices that ``point`` holds of a dimension of size ``dim`` split over ``axes``."""
    size = dim // parts(sizes, axes)
    start = size * part(sizes, axes, point)
    return range(start, start + size)
