"""GPipe (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards."""

from jaxtron.parallel.pipeline.limits import one_chunk
from jaxtron.parallel.pipeline.schedule import Schedule, tabulate


def gpipe(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Every stage holds all ``m`` microbatches at once; bubble ``(p−1)/m``.

    Backwards run in the order of the forwards, so gradients are summed in the order of 1f1b.

    Raises:
        ConfigError: more than one chunk a stage.
    """
    one_chunk("gpipe", chunks)
    forwards = microbatches + stages - 1
    return tabulate(
        stages,
        chunks,
        microbatches,
        forward=lambda stage, unit: stage + unit.microbatch,
        backward=lambda stage, unit: forwards + (stages - 1 - stage) + unit.microbatch,
    )
