"""Blends, against the greedy rule written out with plain Python numbers."""

import math

import numpy as np
import pytest

from jaxtron.data.blend import (
    BlendedDataset,
    build_blend_indices,
    normalize,
    parse_blend,
    plan_weighted_blend,
)
from jaxtron.errors import ConfigError


def greedy(weights, size):
    """Dataset and row of each sample by the rule, over datasets with a weight."""
    drawn, order = [0] * len(weights), []
    for i in range(size):
        errors = {d: w * float(max(i, 1)) - drawn[d] for d, w in enumerate(weights) if w > 0}
        d = max(errors, key=lambda d: (errors[d], -d))
        order.append((d, drawn[d]))
        drawn[d] += 1
    return order


def pairs(indices):
    return list(zip(indices.dataset_index.tolist(), indices.dataset_sample_index.tolist()))


def test_the_first_samples_of_a_blend_by_hand():
    # w = (1/2, 1/4, 1/4). i=0, t=1: .5 .25 .25 -> 0. i=1, t=1: -.5 .25 .25 -> 1.
    # i=2: 0 -.5 .5 -> 2. i=3: .5 -.25 -.25 -> 0. i=4: 0 0 0 -> 0. i=5: -.5 .25 .25 -> 1.
    indices = build_blend_indices(np.array([0.5, 0.25, 0.25]), 6)
    assert pairs(indices) == [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 1)]
    assert indices.dataset_index.dtype == np.int16
    assert indices.dataset_sample_index.dtype == np.int64


@pytest.mark.parametrize(
    "weights", [[1.0], [1, 1, 1], [0.3, 0.7], [5, 1, 1, 3], [0.9] + [0.01] * 10, [0, 2, 0, 1]]
)
def test_order_follows_the_greedy_rule(weights):
    shares = normalize(weights)
    assert pairs(build_blend_indices(shares, 500)) == greedy(shares.tolist(), 500)


def test_a_weight_of_zero_draws_nothing_even_in_a_tie():
    # After four samples all three are exactly on their share: a tie that the lowest wins.
    indices = build_blend_indices(np.array([0.0, 0.5, 0.5]), 100)
    assert np.bincount(indices.dataset_index).tolist() == [0, 50, 50]
    plan = plan_weighted_blend([0, 1, 1], 100)
    assert plan.requests[0] == 0


def test_requests_are_megatrons_where_those_suffice():
    plan = plan_weighted_blend([0.3, 0.7], 1001)
    targets = [math.ceil(1001 * 0.3), math.ceil(1001 * 0.7)]
    assert plan.requests == [math.ceil(301 * 1.005), math.ceil(701 * 1.005)]
    assert len(plan.indices.dataset_index) == sum(targets)


@pytest.mark.parametrize(
    "weights, size", [([0.9] + [0.001] * 100, 100), ([1, 1, 1], 1), ([3, 1], 7), ([1] * 300, 5)]
)
def test_no_index_runs_past_what_a_component_is_asked_for(weights, size):
    plan = plan_weighted_blend(weights, size)
    for d, request in enumerate(plan.requests):
        rows = plan.indices.dataset_sample_index[plan.indices.dataset_index == d]
        assert rows.tolist() == list(range(len(rows)))
        assert len(rows) <= request
    assert len(plan.indices.dataset_index) >= size


def test_used_up_datasets_are_passed_over():
    capacities = [3, 10, 0, 7]
    indices = build_blend_indices(normalize(capacities), 20, capacities)
    counts = np.bincount(indices.dataset_index, minlength=4)
    assert counts.tolist() == capacities
    with pytest.raises(ValueError, match="hold 20"):
        build_blend_indices(normalize(capacities), 21, capacities)


@pytest.mark.parametrize(
    "entries, prefixes, weights",
    [
        (["a"], ["a"], None),
        (["a", "b", "c"], ["a", "b", "c"], None),
        (["a", "b"], ["a", "b"], None),
        (["0.3", "a", "0.7", "b"], ["a", "b"], [0.3, 0.7]),
        ([30, "a", 70.5, " b "], ["a", "b"], [30.0, 70.5]),
        ([1, "a"], ["a"], [1.0]),
        ([], [], None),
        ([0.3, "a", 0.7, [1, "b", 1, "c"]], ["a", [1, "b", 1, "c"]], [0.3, 0.7]),
        (["a", ["b", ["c", "d"]]], ["a", "b", "c", "d"], None),
        ([[1, "a", 2, "b"]], [[1, "a", 2, "b"]], None),
    ],
)
def test_paths_with_and_without_weights(entries, prefixes, weights):
    assert parse_blend(entries) == (prefixes, weights)


@pytest.mark.parametrize(
    "entries",
    [
        ["a", 0.3],
        [0.3, "a", "b", 0.7],
        [0.3, "a", "b"],
        [0.3],
        [0.5, 0.5],
        [-1, "a", 2, "b"],
        ["nan", "a"],
        ["inf", "a"],
        [0, "a", 0, "b"],
        [0.3, "a", 0.7, ["b", 0.5]],
        [0.3, "a", 0.7, []],
        [["a"], 0.3],
        ["a", [1, "b", 2, "c"]],
        ["a", True],
        ["a", {"b": 1}],
    ],
)
def test_paths_that_mix_weights_and_prefixes_are_refused(entries):
    with pytest.raises(ConfigError, match=r"data\.valid_paths"):
        parse_blend(entries, "data.valid_paths")


class Rows:
    """Rows that say where they come from."""

    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return {"from": (self.name, index)}


def test_rows_come_from_the_component_that_the_order_names():
    indices = build_blend_indices(np.array([0.0, 0.75, 0.25]), 4)
    blend = BlendedDataset([None, Rows("b"), Rows("c")], indices)
    got = [blend[i]["from"] for i in range(len(blend))]
    assert got == [("b", 0), ("c", 0), ("b", 1), ("b", 2)]
    for k in (-1, 4):
        with pytest.raises(IndexError):
            blend[k]
