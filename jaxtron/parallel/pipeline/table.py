"""A schedule as arrays, for the executor's scans over ticks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtron.parallel.pipeline.layout import Placement
from jaxtron.parallel.pipeline.schedule import Schedule, Unit


@dataclass(frozen=True)
class Programs:
    """The different stretches of layers that the stages' chunks run.

    A stretch is ``(start, count)`` in the stage's own layers. With an even placement there is one
    for each chunk; uneven stages add some.

    Attributes:
        stretches: the distinct ones, ascending.
        of: ``of[stage][chunk]``, its number.
        first: ``first[stage][chunk]``, the model's number of its first layer.
    """

    stretches: tuple[tuple[int, int], ...]
    of: tuple[tuple[int, ...], ...]
    first: tuple[tuple[int, ...], ...]


def programs(placement: Placement) -> Programs:
    """The stretches of a placement."""
    rows, firsts = [], []
    for chunks in placement.layers:
        starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        rows.append([(int(s), len(c)) for s, c in zip(starts, chunks, strict=False)])
        firsts.append(tuple(chunk.start for chunk in chunks))
    stretches = tuple(sorted({stretch for row in rows for stretch in row}))
    of = tuple(tuple(stretches.index(stretch) for stretch in row) for row in rows)
    return Programs(stretches, of, tuple(firsts))


Table = dict[str, np.ndarray]


@dataclass(frozen=True)
class Phase:
    """Consecutive ticks in which the same halves are at work on some stage.

    Attributes:
        table: rows of :func:`tick_table`.
        forward: whether any stage forwards in these ticks (in every one of them).
        backward: whether any stage backwards.
    """

    table: Table
    forward: bool
    backward: bool

    def share(self, *names: str) -> float:
        """Ticks that have a ``head``, ``left`` or ``enters``, of all; of several names, any."""
        return float(np.mean(np.any([self.table[name] >= 0 for name in names], axis=0)))

    def within(self, name: str, other: str) -> bool:
        """Whether every tick that has a ``name`` has the ``other``."""
        return bool(np.all((self.table[name] < 0) | (self.table[other] >= 0)))


def phases(schedule: Schedule, table: Table) -> list[Phase]:
    """The ticks cut where forwards or backwards set in or end.

    Warm-up, steady state and cool-down of the schedules here: forwards alone, both, backwards
    alone.
    """
    kinds = [
        (any(c.forward is not None for c in row), any(c.backward is not None for c in row))
        for row in schedule.ticks
    ]
    cuts = [0, *(t for t in range(1, len(kinds)) if kinds[t] != kinds[t - 1]), len(kinds)]
    return [
        Phase({name: rows[start:stop] for name, rows in table.items()}, *kinds[start])
        for start, stop in itertools.pairwise(cuts)
    ]


def tick_table(schedule: Schedule, programs: Programs) -> Table:
    """What every stage does in every tick.

    Returns:
        ``[ticks, stages]`` arrays, for ``f`` (forward) and ``b`` (backward): ``*_works`` (the stage
        has a unit), ``*_stretch`` (number of the stretch), ``*_microbatch``, ``*_first`` (number of
        the first layer), ``*_slot`` (of the residual buffer; a forward without a unit has one that
        is free, a backward without one those of the last forward, whose residuals it can read),
        ``*_begins`` (the unit is the model's first virtual stage) and ``*_ends`` (the last);
        ``next_begins``, ``f_begins`` of the next tick, and ``last_begins``, ``b_begins`` of the
        tick before.

        ``[ticks]`` arrays that hold for all stages, -1 for none: ``head``, the microbatch whose
        loss is taken; ``enters``, the one to be embedded for the next tick; ``left``, the one whose
        embedding got its gradient in the tick before. The last microbatch leaves in the last tick.
    """
    count, stages = len(schedule.ticks), schedule.stages
    table: Table = {
        f"{half}_{name}": np.zeros((count, stages), np.bool_ if name in _FLAGS else np.int32)
        for half in "fb"
        for name in (*_RESIDUALS, *_FLAGS)
    }
    table.update({name: np.full(count, -1, np.int32) for name in ("enters", "head", "left")})
    for stage in range(stages):
        held = set[int]()
        forwarded: dict[str, int] = {}
        for t, row in enumerate(schedule.ticks):
            cell = row[stage]
            free = next(slot for slot in itertools.count() if slot not in held)
            table["f_slot"][t, stage] = free
            for half, unit, slot in (
                ("f", cell.forward, cell.slot_written),
                ("b", cell.backward, cell.slot_read),
            ):
                if unit is None:
                    continue
                values = {
                    "works": True,
                    "stretch": programs.of[stage][unit.chunk],
                    "microbatch": unit.microbatch,
                    "first": programs.first[stage][unit.chunk],
                    "slot": slot or 0,
                    "begins": _begins(stage, unit),
                    "ends": _ends(schedule, stage, unit),
                }
                for name, value in values.items():
                    table[f"{half}_{name}"][t, stage] = value
            if any(other.forward is not None for other in row):
                forwarded = {name: int(table[f"f_{name}"][t, stage]) for name in _RESIDUALS}
            if cell.backward is None:
                for name, value in forwarded.items():
                    table[f"b_{name}"][t, stage] = value
            if cell.slot_written is not None:
                held.add(cell.slot_written)
            if cell.slot_read is not None:
                held.remove(cell.slot_read)
            if cell.forward is not None and _begins(stage, cell.forward) and t > 0:
                table["enters"][t - 1] = cell.forward.microbatch
            if cell.forward is not None and _ends(schedule, stage, cell.forward):
                table["head"][t] = cell.forward.microbatch
            if cell.backward is not None and _begins(stage, cell.backward) and t + 1 < count:
                table["left"][t + 1] = cell.backward.microbatch
    for array, of, shift in (("next_begins", "f_begins", -1), ("last_begins", "b_begins", 1)):
        table[array] = np.roll(table[of], shift, axis=0)
        table[array][shift if shift < 0 else 0] = False
    return table


def head_gradients_wait(schedule: Schedule) -> bool:
    """Whether a unit of the last virtual stage is backwarded later than in its forward's tick."""
    return any(
        row[-1].backward is not None
        and _ends(schedule, schedule.stages - 1, row[-1].backward)
        and row[-1].backward != row[-1].forward
        for row in schedule.ticks
    )


_RESIDUALS: Sequence[str] = ("stretch", "microbatch", "first", "slot")
_FLAGS: Sequence[str] = ("works", "begins", "ends")


def _begins(stage: int, unit: Unit) -> bool:
    return stage == 0 and unit.chunk == 0


def _ends(schedule: Schedule, stage: int, unit: Unit) -> bool:
    return stage == schedule.stages - 1 and unit.chunk == schedule.chunks - 1
