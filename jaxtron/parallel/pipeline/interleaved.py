"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): several chunks on each stage."""

from jaxtron.errors import ConfigError
from jaxtron.parallel.pipeline.schedule import Schedule, Unit, tabulate


def interleaved(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Stage ``i`` holds at most ``p·v+p−1−2i`` chunks; bubble ``(p−1)/(v·m)``.

    Microbatches go in groups of ``p``: a stage runs its first chunk on the group, then its second,
    and so on. When the group leaves the last stage its first microbatch is just in time for the
    next chunk of the first stage. Backwards do the same from the last chunk down.

    Raises:
        ConfigError: one chunk a stage, or microbatches that do not fill groups of ``p``.
    """
    if chunks == 1:
        raise ConfigError(
            "parallel.pipeline_schedule is interleaved, but parallel.virtual_pipeline is 1, so "
            "there is nothing to interleave: set parallel.virtual_pipeline to 2 or more, or "
            "parallel.pipeline_schedule to 1f1b"
        )
    if microbatches % stages:
        below = microbatches // stages * stages
        choices = " or ".join(str(count) for count in (below, below + stages) if count)
        raise ConfigError(
            f"parallel.pipeline_schedule is interleaved, but a step has {microbatches} "
            f"microbatches, which is not a multiple of parallel.pipeline {stages}: choose "
            f"train.global_batch_size and train.micro_batch_size (or train.num_microbatches) so "
            f"that it has {choices}, or set parallel.pipeline_schedule to 1f1b with "
            "parallel.virtual_pipeline 1"
        )

    def place(microbatch: int, chunk: int) -> int:
        """Place of a unit in the order in which every stage runs them."""
        group, member = divmod(microbatch, stages)
        return (group * chunks + chunk) * stages + member

    # The first microbatch leaves the last chunk of the last stage in this tick.
    turn = stages * chunks - 1

    def backward(stage: int, unit: Unit) -> int:
        return turn + (stages - 1 - stage) + place(unit.microbatch, chunks - 1 - unit.chunk)

    return tabulate(
        stages,
        chunks,
        microbatches,
        forward=lambda stage, unit: stage + place(unit.microbatch, unit.chunk),
        backward=backward,
    )
