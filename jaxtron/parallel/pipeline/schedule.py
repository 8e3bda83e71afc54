"""A pipeline schedule as data: what every stage does in every tick. Pure Python.

All stages go through the ticks in lock step. In a tick a stage runs at most one forward and then at
most one backward, so the last stage can run the backward of the microbatch that it has just
forwarded. After the tick the outputs move to the next stage and the gradients to the previous one,
to be used in the next tick. A unit of work is one chunk (virtual stage) of layers on one
microbatch: chunk ``c`` of stage ``i`` is virtual stage ``c · stages + i``, so outputs of the last
stage go around to the first one, to its next chunk.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from jaxtron.errors import ConfigError


class Unit(NamedTuple):
    """Work of one stage: one of its chunks of layers on one microbatch."""

    microbatch: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One stage in one tick.

    Attributes:
        forward: the unit forwarded; its input came with the message of the tick before, or is an
            embedded microbatch.
        backward: the unit whose gradients are computed, after ``forward``; the gradient of its
            output came with the message of the tick before. The last virtual stage gets it from
            the head, in the tick of its forward, and keeps it in the unit's slot when its backward
            comes in a later tick.
        slot_written: where ``forward`` keeps its residuals.
        slot_read: where ``backward`` finds them; free again after the tick.
        sends_output_to: stage that gets the output of ``forward`` after the tick; None: no forward,
            or that of the last virtual stage.
        sends_gradient_to: stage that gets the input's gradient from ``backward``; None: no
            backward, or that of the first virtual stage.
        receives_output: after the tick, the input of this unit arrives here.
        receives_gradient: after the tick, the gradient of this unit's output arrives here.
    """

    forward: Unit | None = None
    backward: Unit | None = None
    slot_written: int | None = None
    slot_read: int | None = None
    sends_output_to: int | None = None
    sends_gradient_to: int | None = None
    receives_output: Unit | None = None
    receives_gradient: Unit | None = None


@dataclass(frozen=True)
class Schedule:
    """The table of a pipeline's step.

    Attributes:
        stages: p, devices of the pipeline axis.
        chunks: v, virtual stages on each of them.
        microbatches: m, of one step.
        ticks: ``ticks[t][i]`` is stage ``i`` in tick ``t``.
    """

    stages: int
    chunks: int
    microbatches: int
    ticks: tuple[tuple[Cell, ...], ...]

    def held(self, stage: int) -> Iterator[tuple[Unit, ...]]:
        """Per tick, the units whose residuals ``stage`` holds while the tick runs."""
        held: list[Unit] = []
        for row in self.ticks:
            cell = row[stage]
            if cell.forward is not None:
                held.append(cell.forward)
            yield tuple(held)
            if cell.backward is not None:
                held.remove(cell.backward)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Per stage, the slots of its residual buffer: the most units it holds at once."""
        return tuple(
            1 + max(row[stage].slot_written or 0 for row in self.ticks)
            for stage in range(self.stages)
        )

    def half_lengths(
        self,
        forward_cost: int | Fraction = 1,
        backward_cost: int | Fraction = 2,
        work: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[tuple[Fraction, Fraction]]:
        """How long the forward and the backward half of every tick last.

        A half ends with an exchange of messages, so it lasts as long as its longest unit, and no
        time at all when no stage has one: warm-up ticks run only forwards and cool-down ticks only
        backwards.

        Args:
            forward_cost: of a unit, or of one layer when ``work`` is given.
            backward_cost: likewise; twice the forward by default.
            work: layers per stage and chunk, ``work[i][c]``; None: all units are alike.
        """
        for row in self.ticks:
            forward = [_work(work, i, cell.forward) for i, cell in enumerate(row)]
            backward = [_work(work, i, cell.backward) for i, cell in enumerate(row)]
            yield Fraction(forward_cost) * max(forward), Fraction(backward_cost) * max(backward)

    def bubble(
        self,
        forward_cost: int | Fraction = 1,
        backward_cost: int | Fraction = 2,
        work: Sequence[Sequence[int]] | None = None,
    ) -> Fraction:
        """Idle time of all stages over their useful time; arguments as :meth:`half_lengths`.

        With units all alike the costs cancel: ``(p−1)/m`` for gpipe and 1f1b, ``(p−1)/(v·m)``
        interleaved (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
        """
        cost = Fraction(forward_cost) + Fraction(backward_cost)
        per_microbatch = (
            self.stages * self.chunks if work is None else sum(sum(chunks) for chunks in work)
        )
        useful = cost * self.microbatches * per_microbatch
        lasts = sum(sum(halves) for halves in self.half_lengths(forward_cost, backward_cost, work))
        return (self.stages * lasts - useful) / useful


TickOf = Callable[[int, Unit], int]
"""``(stage, unit) -> tick``."""


def forward_schedule(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Forwards alone, for evaluation and inference: units follow each other without a gap.

    Chunks take turns as in the interleaved schedule; any number of microbatches will do.
    """

    def forward(stage: int, unit: Unit) -> int:
        group, member = divmod(unit.microbatch, stages)
        return stage + (group * chunks + unit.chunk) * stages + member

    return tabulate(stages, chunks, microbatches, forward=forward, backward=None)


def tabulate(
    stages: int, chunks: int, microbatches: int, *, forward: TickOf, backward: TickOf | None
) -> Schedule:
    """Make the table of a schedule from the tick of every unit's forward and backward.

    Every stage runs every unit exactly once; slots and messages follow from the ticks. Without
    ``backward`` the table has forwards alone.

    Raises:
        ConfigError: the ticks are no schedule: two units at once, a backward before its forward, or
            a unit that does not run in the tick after its input arrives.
    """
    units = [Unit(m, c) for m in range(microbatches) for c in range(chunks)]
    forwards = [_by_tick(forward, stage, units, "forwards") for stage in range(stages)]
    backwards = [
        {} if backward is None else _by_tick(backward, stage, units, "backwards")
        for stage in range(stages)
    ]
    count = 1 + max(max(table, default=0) for table in forwards + backwards)
    columns = []
    for stage in range(stages):
        written, read = _slots(forwards[stage], backwards[stage], count, stage)
        column = []
        for tick in range(count):
            unit, done = forwards[stage].get(tick), backwards[stage].get(tick)
            column.append(
                Cell(
                    forward=unit,
                    backward=done,
                    slot_written=written.get(tick),
                    slot_read=read.get(tick),
                    sends_output_to=_sends(stage, unit, +1, stages, chunks),
                    sends_gradient_to=_sends(stage, done, -1, stages, chunks),
                    receives_output=_receives(forwards, stage, tick, +1, chunks),
                    receives_gradient=_receives(backwards, stage, tick, -1, chunks),
                )
            )
        columns.append(column)
    schedule = Schedule(stages, chunks, microbatches, tuple(zip(*columns, strict=True)))
    _check_arrivals(schedule)
    return schedule


def _work(work: Sequence[Sequence[int]] | None, stage: int, unit: Unit | None) -> int:
    if unit is None:
        return 0
    return 1 if work is None else work[stage][unit.chunk]


def _by_tick(tick_of: TickOf, stage: int, units: list[Unit], does: str) -> dict[int, Unit]:
    table: dict[int, Unit] = {}
    for unit in units:
        tick = tick_of(stage, unit)
        if tick < 0 or tick in table:
            other = f"together with {tuple(table[tick])}" if tick in table else "before the first"
            raise ConfigError(
                f"pipeline schedule: stage {stage} {does} (microbatch, chunk) {tuple(unit)} in "
                f"tick {tick}, {other}: a tick has room for one from tick 0 on"
            )
        table[tick] = unit
    return table


def _slots(
    forwards: dict[int, Unit], backwards: dict[int, Unit], count: int, stage: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Per tick the slot written and the slot read: always the lowest that is free.

    The lowest free slot is enough: the number of slots is then the most units held at once.
    """
    free, held = list(range(len(forwards))), dict[Unit, int]()
    written, read = dict[int, int](), dict[int, int]()
    for tick in range(count):
        if tick in forwards:
            held[forwards[tick]] = written[tick] = heapq.heappop(free)
        if tick in backwards:
            unit = backwards[tick]
            if unit not in held:
                raise ConfigError(
                    f"pipeline schedule: stage {stage} backwards (microbatch, chunk) "
                    f"{tuple(unit)} in tick {tick}, before its forward"
                )
            read[tick] = held.pop(unit)
            heapq.heappush(free, read[tick])
    return written, read


def _neighbour(
    stage: int, unit: Unit, step: int, stages: int, chunks: int
) -> tuple[int, Unit] | None:
    """Where a microbatch is one virtual stage further on (step 1) or back (step −1)."""
    virtual = unit.chunk * stages + stage + step
    if not 0 <= virtual < stages * chunks:
        return None
    return virtual % stages, Unit(unit.microbatch, virtual // stages)


def _sends(stage: int, unit: Unit | None, step: int, stages: int, chunks: int) -> int | None:
    to = None if unit is None else _neighbour(stage, unit, step, stages, chunks)
    return None if to is None else to[0]


def _receives(
    tables: list[dict[int, Unit]], stage: int, tick: int, step: int, chunks: int
) -> Unit | None:
    """The unit of ``stage`` that the neighbour's work of this tick feeds."""
    sender = (stage - step) % len(tables)
    unit = tables[sender].get(tick)
    to = None if unit is None else _neighbour(sender, unit, step, len(tables), chunks)
    return None if to is None else to[1]


def _check_arrivals(schedule: Schedule) -> None:
    """A stage has one register a direction, so what arrives must be used in the next tick."""
    after = [*schedule.ticks[1:], (Cell(),) * schedule.stages]
    for tick, (row, following) in enumerate(zip(schedule.ticks, after, strict=True)):
        for stage, (cell, then) in enumerate(zip(row, following, strict=True)):
            for name, arrives, runs in (
                ("forward", cell.receives_output, then.forward),
                ("backward", cell.receives_gradient, then.backward),
            ):
                if arrives is not None and arrives != runs:
                    raise ConfigError(
                        f"pipeline schedule: what the {name} of (microbatch, chunk) "
                        f"{tuple(arrives)} needs reaches stage {stage} after tick {tick}, but it "
                        f"does not run in tick {tick + 1}"
                    )
