"""A schedule as arrays, for the executor's scan over ticks."""

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


def tick_table(schedule: Schedule, programs: Programs) -> dict[str, np.ndarray]:
    """What every stage does in every tick.

    Returns:
        ``[ticks, stages]`` arrays, for ``f`` (forward) and ``b`` (backward): ``*_branch`` (0: idle,
        else 1 + number of the stretch), ``*_microbatch``, ``*_first`` (number of the first layer),
        ``*_slot`` (of the residual buffer), ``*_begins`` (the unit is the model's first virtual
        stage) and ``*_ends`` (the last); ``next_begins``, ``f_begins`` of the next tick, and
        ``last_begins``, ``b_begins`` of the tick before.

        ``[ticks]`` arrays that hold for all stages, -1 for none: ``head``, the microbatch whose
        loss is taken; ``enters``, the one to be embedded for the next tick; ``left``, the one whose
        embedding got its gradient in the tick before. One last row, in which no stage works, takes
        up the last ``left``.
    """
    count, stages = len(schedule.ticks) + 1, schedule.stages
    table: dict[str, np.ndarray] = {
        f"{half}_{name}": np.zeros((count, stages), np.bool_ if name in _FLAGS else np.int32)
        for half in "fb"
        for name in ("branch", "microbatch", "first", "slot", *_FLAGS)
    }
    table.update({name: np.full(count, -1, np.int32) for name in ("enters", "head", "left")})
    for t, row in enumerate(schedule.ticks):
        for stage, cell in enumerate(row):
            for half, unit, slot in (
                ("f", cell.forward, cell.slot_written),
                ("b", cell.backward, cell.slot_read),
            ):
                if unit is None:
                    continue
                values = {
                    "branch": 1 + programs.of[stage][unit.chunk],
                    "microbatch": unit.microbatch,
                    "first": programs.first[stage][unit.chunk],
                    "slot": slot or 0,
                    "begins": _begins(stage, unit),
                    "ends": _ends(schedule, stage, unit),
                }
                for name, value in values.items():
                    table[f"{half}_{name}"][t, stage] = value
            if cell.forward is not None and _begins(stage, cell.forward) and t > 0:
                table["enters"][t - 1] = cell.forward.microbatch
            if cell.forward is not None and _ends(schedule, stage, cell.forward):
                table["head"][t] = cell.forward.microbatch
            if cell.backward is not None and _begins(stage, cell.backward):
                table["left"][t + 1] = cell.backward.microbatch
    table["next_begins"] = np.roll(table["f_begins"], -1, axis=0)
    table["last_begins"] = np.roll(table["b_begins"], 1, axis=0)
    return table


def head_gradients_wait(schedule: Schedule) -> bool:
    """Whether a unit of the last virtual stage is backwarded later than in its forward's tick."""
    return any(
        row[-1].backward is not None
        and _ends(schedule, schedule.stages - 1, row[-1].backward)
        and row[-1].backward != row[-1].forward
        for row in schedule.ticks
    )


_FLAGS: Sequence[str] = ("begins", "ends")


def _begins(stage: int, unit: Unit) -> bool:
    return stage == 0 and unit.chunk == 0


def _ends(schedule: Schedule, stage: int, unit: Unit) -> bool:
    return stage == schedule.stages - 1 and unit.chunk == schedule.chunks - 1
