"""Proofs of the schedules, over a grid of sizes, from the rows of their tables alone."""

import dataclasses
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest

from jaxtron.errors import ConfigError
from jaxtron.parallel.pipeline.layout import place_layers
from jaxtron.parallel.pipeline.registry import SCHEDULES, make_schedule
from jaxtron.parallel.pipeline.schedule import forward_schedule, tabulate
from jaxtron.parallel.pipeline.table import programs, tick_table

ONE_CHUNK = [(p, 1, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8, 17)]
SEVERAL = [(p, v, k * p) for p in (1, 2, 3, 4, 8) for v in (2, 3) for k in (1, 4)]
GRID = [
    (name, *size)
    for name in SCHEDULES
    for size in (SEVERAL if name == "interleaved" else ONE_CHUNK)
]

every_schedule = pytest.mark.parametrize("name, p, v, m", GRID)


@cache
def table(name, p, v, m):
    return SCHEDULES[name](p, v, m)


def ticks_of(schedule, what):
    """``{(stage, microbatch, chunk): tick}``; fails when a unit runs twice."""
    found = {}
    for tick, row in enumerate(schedule.ticks):
        assert len(row) == schedule.stages
        for stage, cell in enumerate(row):
            if (unit := getattr(cell, what)) is not None:
                assert (stage, *unit) not in found
                found[stage, *unit] = tick
    return found


@every_schedule
def test_every_chunk_of_every_microbatch_runs_forward_and_backward_once(name, p, v, m):
    schedule = table(name, p, v, m)
    expected = {(i, j, c) for i in range(p) for j in range(m) for c in range(v)}
    assert set(ticks_of(schedule, "forward")) == expected
    assert set(ticks_of(schedule, "backward")) == expected


@every_schedule
def test_work_waits_for_the_message_of_the_tick_before(name, p, v, m):
    schedule = table(name, p, v, m)
    forward, backward = ticks_of(schedule, "forward"), ticks_of(schedule, "backward")
    # The stages and chunks that a microbatch passes through, in order.
    path = [(i, c) for c in range(v) for i in range(p)]
    for j in range(m):
        for (i, c), (i2, c2) in pairwise(path):
            assert forward[i2, j, c2] >= forward[i, j, c] + 1
            assert backward[i, j, c] >= backward[i2, j, c2] + 1
        i, c = path[-1]
        assert backward[i, j, c] >= forward[i, j, c]


@every_schedule
def test_every_input_is_the_message_that_came_after_the_tick_before(name, p, v, m):
    schedule = table(name, p, v, m)
    sent = received = 0
    output, gradient = [None] * p, [None] * p  # in each stage's registers
    for row in schedule.ticks:
        for i, cell in enumerate(row):
            if cell.forward is not None and (i, cell.forward.chunk) != (0, 0):
                assert output[i] == cell.forward
            if cell.backward is not None and (i, cell.backward.chunk) != (p - 1, v - 1):
                assert gradient[i] == cell.backward
        output, gradient = [None] * p, [None] * p
        for cell in row:
            if (to := cell.sends_output_to) is not None:
                j, c = cell.forward
                output[to] = (j, c + 1 if to == 0 else c)
            if (to := cell.sends_gradient_to) is not None:
                j, c = cell.backward
                gradient[to] = (j, c - 1 if to == p - 1 else c)
            sent += (cell.sends_output_to is not None) + (cell.sends_gradient_to is not None)
        assert output == [cell.receives_output for cell in row]
        assert gradient == [cell.receives_gradient for cell in row]
        received += sum(message is not None for message in output + gradient)
    assert sent == received == 2 * m * (p * v - 1)


@every_schedule
def test_a_backward_finds_its_own_residuals_and_slots_are_as_many_as_units_held(name, p, v, m):
    schedule = table(name, p, v, m)
    for i in range(p):
        memory, most, used = {}, 0, set()
        for row, held in zip(schedule.ticks, schedule.held(i), strict=True):
            cell = row[i]
            if cell.forward is not None:
                assert cell.slot_written not in memory  # not overwritten before it is read
                memory[cell.slot_written] = cell.forward
                used.add(cell.slot_written)
            assert sorted(memory.values()) == sorted(held)
            most = max(most, len(memory))
            if cell.backward is not None:
                assert memory.pop(cell.slot_read) == cell.backward
            assert (cell.slot_written is None) == (cell.forward is None)
            assert (cell.slot_read is None) == (cell.backward is None)
        assert not memory
        assert schedule.slots[i] == most == len(used)
        assert used == set(range(most))


@every_schedule
def test_units_in_flight_keep_to_the_bound(name, p, v, m):
    slots = table(name, p, v, m).slots
    for i in range(p):
        bound = {
            "gpipe": m,
            "1f1b": 2 * (p - i) - 1,
            "interleaved": p * v + p - 1 - 2 * i,
        }[name]
        assert slots[i] == min(bound, v * m)  # reached when there are units enough


@every_schedule
def test_bubble_is_the_closed_form_whatever_the_costs(name, p, v, m):
    schedule = table(name, p, v, m)
    for costs in [(1, 1), (1, 2), (Fraction(3, 7), 5)]:
        assert schedule.bubble(*costs) == Fraction(p - 1, v * m)


@every_schedule
def test_warm_up_runs_only_forwards_and_cool_down_only_backwards(name, p, v, m):
    halves = list(table(name, p, v, m).half_lengths(1, 1))
    warm_up = {"gpipe": m + p - 1, "1f1b": p - 1, "interleaved": p * v - 1}[name]
    assert all(half == (1, 0) for half in halves[:warm_up])
    assert all(half == (1, 1) for half in halves[warm_up : len(halves) - warm_up])
    assert all(half == (0, 1) for half in halves[len(halves) - warm_up :])


def test_1f1b_of_two_stages_and_three_microbatches_is_the_one_on_paper():
    rows = SCHEDULES["1f1b"](2, 1, 3).ticks
    shown = [
        [(c.forward and c.forward.microbatch, c.backward and c.backward.microbatch) for c in row]
        for row in rows
    ]
    assert shown == [
        [(0, None), (None, None)],
        [(1, None), (0, 0)],
        [(2, 0), (1, 1)],
        [(None, 1), (2, 2)],
        [(None, 2), (None, None)],
    ]


def test_interleaved_order_of_a_stage_is_groups_of_p_chunk_by_chunk():
    schedule = SCHEDULES["interleaved"](2, 2, 4)
    forwards = [tuple(row[0].forward) for row in schedule.ticks if row[0].forward]
    backwards = [tuple(row[1].backward) for row in schedule.ticks if row[1].backward]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    assert backwards == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]


def test_bubble_of_uneven_stages_counts_the_wait_for_the_longest():
    # Two stages of 1 and 3 layers, two microbatches, forward 1 and backward 1 a layer. Ticks last
    # 1 | 3+3 | 3+3 | 1: 14 on each of 2 stages, of which 2 · (1+3) · 2 = 16 are useful.
    assert SCHEDULES["1f1b"](2, 1, 2).bubble(1, 1, [[1], [3]]) == Fraction(28 - 16, 16)


@pytest.mark.parametrize("m, fix", [(1, "has 4,"), (6, "has 4 or 8,"), (9, "has 8 or 12,")])
def test_interleaved_refuses_microbatches_that_do_not_fill_groups(m, fix):
    with pytest.raises(ConfigError, match=rf"{m} microbatches.*parallel\.pipeline 4.*{fix}"):
        SCHEDULES["interleaved"](4, 2, m)


def test_chunks_that_a_schedule_cannot_use_are_refused():
    for name in ("gpipe", "1f1b"):
        with pytest.raises(ConfigError, match=f"virtual_pipeline is 2.*{name}.*interleaved"):
            SCHEDULES[name](4, 2, 8)
    with pytest.raises(ConfigError, match="virtual_pipeline is 1.*nothing to interleave"):
        SCHEDULES["interleaved"](4, 1, 8)


@pytest.mark.parametrize(
    "forward, backward, message",
    [
        (lambda i, u: i, lambda i, u: 9 + u.microbatch - i, "together with"),
        (lambda i, u: i + u.microbatch, lambda i, u: u.microbatch - i, "before the first"),
        (lambda i, u: 4 + i + u.microbatch, lambda i, u: 1 + u.microbatch - i, "its forward"),
        (lambda i, u: 2 * i + u.microbatch, lambda i, u: 9 + u.microbatch - i, "tick 0, but"),
    ],
)
def test_ticks_that_are_no_schedule_are_refused(forward, backward, message):
    with pytest.raises(ConfigError, match=message):
        tabulate(2, 1, 2, forward=forward, backward=backward)


def own_schedule(stages, chunks, microbatches):
    return SCHEDULES["1f1b"](stages, chunks, microbatches)


def one_microbatch_less(stages, chunks, microbatches):
    return SCHEDULES["1f1b"](stages, chunks, microbatches - 1)


def forwards_alone(stages, chunks, microbatches):
    return forward_schedule(stages, chunks, microbatches)


def one_backward_twice(stages, chunks, microbatches):
    whole = SCHEDULES["1f1b"](stages, chunks, microbatches)
    return dataclasses.replace(whole, ticks=(*whole.ticks, whole.ticks[-1]))


def nothing(stages, chunks, microbatches):
    return None


def of_two_sizes(stages, microbatches):
    return SCHEDULES["1f1b"](stages, 1, microbatches)


def test_a_new_schedule_is_a_function_found_by_name():
    assert make_schedule("1f1b", 2, 1, 2) == own_schedule(2, 1, 2)
    assert make_schedule(f"{__name__}:own_schedule", 2, 1, 2) == own_schedule(2, 1, 2)
    for name, message in [
        ("2f2b", "'2f2b'.*gpipe, 1f1b, interleaved"),
        ("no.such:thing", "cannot be imported"),
        ("jaxtron.parallel.pipeline.registry:SCHEDULES", "is a dict"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_schedule(name, 2, 1, 2)


@pytest.mark.parametrize(
    "function, message",
    [
        ("one_microbatch_less", "returned a schedule of 2, 1 and 3"),
        ("forwards_alone", "backwards 0 units on stage 0, not each of 4 once"),
        ("one_backward_twice", "backwards 5 units on stage 0, not each of 4 once"),
        ("nothing", "returned a NoneType, not a Schedule"),
        ("of_two_sizes", "failed for 2 stages, 1 chunks and 4 microbatches: TypeError"),
    ],
)
def test_a_function_that_gives_no_schedule_of_the_step_is_refused(function, message):
    name = f"{__name__}:{function}"
    with pytest.raises(ConfigError, match=f"parallel.pipeline_schedule={name}.*{message}"):
        make_schedule(name, 2, 1, 4)


@pytest.mark.parametrize(
    "name, p, v, m, slots",
    [
        ("1f1b", 2, 1, 6, 3),
        ("1f1b", 4, 1, 8, 7),
        ("interleaved", 2, 2, 4, 5),
        ("interleaved", 4, 2, 8, 11),
        # one more where a stage may hold all microbatches: ticks without a unit write to it
        ("1f1b", 4, 1, 4, 5),
        ("gpipe", 2, 1, 6, 7),
    ],
)
def test_the_executors_buffer_has_the_slots_of_the_schedule(name, p, v, m, slots):
    placement = place_layers(p * v, p, v, None)
    table = tick_table(SCHEDULES[name](p, v, m), programs(placement))
    assert 1 + table["f_slot"].max() == slots
