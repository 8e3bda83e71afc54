import math

import numpy as np
import pytest

from jaxtron.mesh import grid
from jaxtron.mesh.axes import AXES

SIZES = dict(zip(AXES, (2, 1, 3, 1, 2, 4)))
NUMBERS = np.arange(math.prod(SIZES.values())).reshape(tuple(SIZES.values()))


def test_coordinates_are_those_of_a_row_major_array():
    for device in NUMBERS.flat:
        point = grid.coordinates(SIZES, int(device))
        assert NUMBERS[tuple(point[axis] for axis in AXES)] == device


@pytest.mark.parametrize("axis", AXES)
def test_groups_are_the_lines_of_the_array_along_the_axis(axis):
    lines = np.moveaxis(NUMBERS, AXES.index(axis), -1).reshape(-1, SIZES[axis])
    assert sorted(map(list, grid.groups(SIZES, axis))) == sorted(lines.tolist())


def test_the_first_axis_of_a_split_is_the_major_one():
    # 24 indices over (tensor, pipeline): tensor cuts blocks of 6, pipeline halves them.
    point = grid.coordinates(SIZES, 0) | {"tensor": 2, "pipeline": 1}
    assert grid.span(SIZES, ("tensor", "pipeline"), point, 24) == range(15, 18)
    assert grid.span(SIZES, (), point, 24) == range(24)
