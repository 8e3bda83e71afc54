"""Schedules by the name that ``parallel.pipeline_schedule`` gives them."""

from collections.abc import Callable

from jaxtron.errors import ConfigError, JaxtronError
from jaxtron.parallel.pipeline.gpipe import gpipe
from jaxtron.parallel.pipeline.interleaved import interleaved
from jaxtron.parallel.pipeline.one_f_one_b import one_f_one_b
from jaxtron.parallel.pipeline.schedule import Schedule, Unit
from jaxtron.plugins import import_function

ScheduleFactory = Callable[[int, int, int], Schedule]
"""``(stages, chunks, microbatches) -> Schedule``; raises ConfigError for what it cannot do."""

SCHEDULES: dict[str, ScheduleFactory] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}
"""The schedules at hand; any other is a function named as ``module:function``."""


def make_schedule(name: str, stages: int, chunks: int, microbatches: int) -> Schedule:
    """The table of ``parallel.pipeline_schedule`` for a training step of these sizes.

    Raises:
        ConfigError: no such schedule, it cannot have these sizes, or a function of one's own does
            not give a schedule that forwards and backwards every unit of every stage once.
    """
    if name in SCHEDULES:
        return SCHEDULES[name](stages, chunks, microbatches)
    function = import_function("parallel.pipeline_schedule", name, SCHEDULES)
    asked = f"{stages} stages, {chunks} chunks and {microbatches} microbatches"
    try:
        schedule = function(stages, chunks, microbatches)
    except JaxtronError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raise ConfigError(
            f"parallel.pipeline_schedule={name} failed for {asked}: {type(error).__name__}: "
            f"{error}; it is called as function(stages, chunks, microbatches)"
        ) from error
    if wrong := _what_is_wrong(schedule, stages, chunks, microbatches):
        raise ConfigError(f"parallel.pipeline_schedule={name}, asked for {asked}, {wrong}")
    return schedule


def _what_is_wrong(schedule: object, stages: int, chunks: int, microbatches: int) -> str | None:
    if not isinstance(schedule, Schedule):
        return (
            f"returned a {type(schedule).__name__}, not a Schedule "
            "(jaxtron.parallel.pipeline.schedule.tabulate makes one)"
        )
    sizes = schedule.stages, schedule.chunks, schedule.microbatches
    if sizes != (stages, chunks, microbatches):
        return f"returned a schedule of {sizes[0]}, {sizes[1]} and {sizes[2]}"
    units = [Unit(m, c) for m in range(microbatches) for c in range(chunks)]
    for stage, column in enumerate(zip(*schedule.ticks, strict=True)):
        for does, done in (
            ("forwards", [cell.forward for cell in column if cell.forward is not None]),
            ("backwards", [cell.backward for cell in column if cell.backward is not None]),
        ):
            if sorted(done) != units:
                return f"{does} {len(done)} units on stage {stage}, not each of {len(units)} once"
    return None
