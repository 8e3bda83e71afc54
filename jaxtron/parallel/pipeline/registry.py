"""Schedules by the name that ``parallel.pipeline_schedule`` gives them."""

import importlib
from collections.abc import Callable

from jaxtron.errors import ConfigError
from jaxtron.parallel.pipeline.gpipe import gpipe
from jaxtron.parallel.pipeline.interleaved import interleaved
from jaxtron.parallel.pipeline.one_f_one_b import one_f_one_b
from jaxtron.parallel.pipeline.schedule import Schedule

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
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(
            f"parallel.pipeline_schedule is {name!r}; it must be one of {', '.join(SCHEDULES)} or "
            "module:function"
        )
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"parallel.pipeline_schedule={name} cannot be imported: {error}"
        ) from error
    if not callable(factory):
        raise ConfigError(
            f"parallel.pipeline_schedule={name} is a {type(factory).__name__}, not a function"
        )
    return factory
