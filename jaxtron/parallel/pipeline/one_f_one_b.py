"""1F1B (Narayanan et al. 2021, arXiv:2104.04473): one forward, one backward, in turn."""

from jaxtron.parallel.pipeline.limits import one_chunk
from jaxtron.parallel.pipeline.schedule import Schedule, tabulate


def one_f_one_b(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Stage ``i`` holds at most ``2(p−i)−1`` microbatches, however many there are.

    Each backward sets out in the tick in which its microbatch reaches the last stage. Bubble
    ``(p−1)/m``; ``m`` may be any number, below ``p`` too.

    Raises:
        ConfigError: more than one chunk a stage.
    """
    one_chunk("1f1b", chunks)
    last = stages - 1
    return tabulate(
        stages,
        chunks,
        microbatches,
        forward=lambda stage, unit: stage + unit.microbatch,
        backward=lambda stage, unit: last + (last - stage) + unit.microbatch,
    )
