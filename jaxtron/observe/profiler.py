"""A trace of chosen steps of a real run, for TensorBoard's profile plug-in, XProf or Perfetto."""

import logging
from pathlib import Path
from typing import Any

import jax

from jaxtron.observe.config import ObserveConfig

logger = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"


class StepProfiler:
    """Traces the steps ``observe.profile_steps`` into ``observe.dir``/profile.

    Steps are dispatched ahead of the devices, so tracing waits for the devices at both ends: the
    trace then holds those steps from their first to their last kernel, and no others. Only the
    primary process traces; a run that resumes inside the range traces the rest of it::

        profiler.before_step(step, state)
        state, metrics = train_step(state, batch)
        profiler.after_step(step, metrics)
        ...
        profiler.close()
    """

    def __init__(self, config: ObserveConfig, *, primary: bool) -> None:
        """Prepare; nothing is traced before the first chosen step."""
        self._steps: tuple[int, int] | None = config.profile_steps if primary else None
        self._folder = Path(config.dir or ".") / PROFILE_FOLDER
        self._tracing = False
        self._first = self._last = 0  # steps that the trace holds
        self._annotation: jax.profiler.StepTraceAnnotation | None = None

    def before_step(self, step: int, pending: Any) -> None:
        """Start the trace if ``step`` is chosen.

        Args:
            step: the step that is about to be dispatched.
            pending: arrays that the step before it computes.
        """
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            return
        if not self._tracing:
            jax.block_until_ready(pending)
            jax.profiler.start_trace(str(self._folder))
            self._tracing, self._first = True, step
        self._last = step
        self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self._annotation.__enter__()

    def after_step(self, step: int, outputs: Any) -> Path | None:
        """Stop the trace if ``step`` is the last chosen one.

        Args:
            step: the step that was dispatched.
            outputs: arrays that it computes.

        Returns:
            The folder of a trace that was just completed, else None.
        """
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._steps is None or not self._tracing or step < self._steps[1]:
            return None
        jax.block_until_ready(outputs)
        return self._stop()

    def close(self) -> None:
        """Complete the trace of a run that ends inside the range."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._tracing:
            self._stop()

    def _stop(self) -> Path:
        jax.profiler.stop_trace()
        self._tracing = False
        logger.info("trace of steps %d to %d written to %s", self._first, self._last, self._folder)
        return self._folder
