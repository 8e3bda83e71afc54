"""A global batch that grows during the first part of a run (``train.rampup_batch_size``).

As in Megatron: with ``[start, increment, samples]`` the first batches have ``start`` rows, and each
further ``samples / number of increments`` samples add ``increment``, up to
``train.global_batch_size``. The size of a step follows from the samples consumed before it, so that
a run that resumes within the ramp goes on with the same batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtron.config.run import TrainConfig


@dataclass(frozen=True)
class Stage:
    """Consecutive steps with batches of one size.

    Attributes:
        first_step: steps done before it.
        first_sample: samples consumed before it.
        size: rows of each batch.
    """

    first_step: int
    first_sample: int
    size: int


@dataclass(frozen=True)
class BatchSchedule:
    """Sizes of the global batches of a run.

    Attributes:
        stages: at least one; the last one has no end.
    """

    stages: tuple[Stage, ...]

    @property
    def final(self) -> int:
        """Rows of the largest batch, ``train.global_batch_size``."""
        return self.stages[-1].size

    def samples(self, steps: int) -> int:
        """Samples consumed by the first ``steps`` steps."""
        stage = [stage for stage in self.stages if stage.first_step <= steps][-1]
        return stage.first_sample + (steps - stage.first_step) * stage.size

    def rest(self, step: int, steps: int) -> Iterator[tuple[int, int]]:
        """``(size, number of steps)`` of what is left of ``steps`` after ``step`` steps."""
        ends = [stage.first_step for stage in self.stages[1:]] + [steps]
        for stage, end in zip(self.stages, ends, strict=True):
            count = min(end, steps) - max(stage.first_step, step)
            if count > 0:
                yield stage.size, count

    def plan_length(self, steps: int) -> int:
        """Length of a run of ``steps`` steps as plans count it: full batches, rounded up."""
        return -(-self.samples(steps) // self.final)

    def full_batches(self, updates: jax.Array | int) -> jax.Array:
        """Samples of the first ``updates`` steps in units of the largest batch, fp32.

        Learning rate and weight decay are functions of it: Megatron counts their plans in samples.
        """
        n = jnp.asarray(updates).astype(jnp.float32)
        progress = n
        for stage in self.stages:
            begin, share = stage.first_sample / self.final, stage.size / self.final
            here = begin + (n - stage.first_step) * share
            progress = jnp.where(n >= stage.first_step, here, progress)
        return progress


def batch_schedule(train: TrainConfig) -> BatchSchedule:
    """The batches that ``train`` asks for."""
    final = train.global_batch_size
    if train.rampup_batch_size is None:
        return BatchSchedule((Stage(0, 0, final),))
    start, increment, ramp_samples = train.rampup_batch_size
    stages, step, sample = [], 0, 0
    increments = (final - start) // increment
    for number in range(increments):
        size = start + number * increment
        # Megatron: size = start + int(consumed / (samples / increments)) * increment
        end = -(-(number + 1) * ramp_samples // increments)
        count = max(0, -(-(end - sample) // size))
        if count:
            stages.append(Stage(step, sample, size))
        step, sample = step + count, sample + count * size
    return BatchSchedule((*stages, Stage(step, sample, final)))
