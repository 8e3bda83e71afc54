"""Schedules by the name that ``parallel.pipeline_schedule`` gives them."""

from collections.abc import Callable

from jaxtron.parallel.pipeline.gpipe import gpipe
from jaxtron.parallel.pipeline.interleaved import interleaved
from jaxtron.parallel.pipeline.one_f_one_b import one_f_one_b
from jaxtron.parallel.pipeline.schedule import Schedule
from jaxtron.plugins import import_function

ScheduleFactory = Callable[[int, int, int], Schedule]
"""``(stages, chunks, microbatches) -> Schedule``; raises ConfigError for what it cannot do."""

SCHEDULES: dict[str, ScheduleFactory] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}
"""The schedules at hand; any other is a function named as ``module:function``."""


def find_schedule(name: str) -> ScheduleFactory:
    """The function behind ``parallel.pipeline_schedule``.

    Raises:
        ConfigError: no such schedule.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    return import_function("parallel.pipeline_schedule", name, SCHEDULES)
