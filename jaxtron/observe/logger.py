"""The one writer of everything that a run records about itself."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from jaxtron.config.yaml_io import to_yaml
from jaxtron.errors import ConfigError
from jaxtron.observe.config import CONFIG_FILE, ObserveConfig
from jaxtron.observe.console import Console, LogLine, evaluation_line
from jaxtron.observe.hardware import memory_figures
from jaxtron.observe.records import MetricsFile, Record, Scalar, to_scalar, write_atomically
from jaxtron.observe.tensorboard import ScalarEvents
from jaxtron.observe.throughput import Keys, Throughput

TENSORBOARD_FOLDER = "tensorboard"

COUNT_KEYS = ("step", "tokens", "consumed_samples", "global_batch_size")
STEP_KEYS = (*COUNT_KEYS, "loss", "grad_norm", "lr", "step_time_s")
"""What the training loop measures itself; the rates and memory figures are added here."""


class RunLogger:
    """Writes metrics.jsonl, TensorBoard events, log lines and the progress bar.

    Only the primary process writes; in all others every method returns at once. A run that resumes
    passes ``start_step``, and the lines of steps after it are set aside (see
    :mod:`jaxtron.observe.records`); TensorBoard is told to hide its events of those steps.

    Use it as a context manager, or call :meth:`close`.
    """

    def __init__(
        self,
        config: ObserveConfig,
        *,
        total_steps: int,
        primary: bool,
        throughput: Throughput,
        start_step: int = 0,
        memory: Callable[[], Mapping[str, Scalar]] = memory_figures,
    ) -> None:
        """Open the run's files.

        Args:
            config: the ``observe`` section.
            total_steps: steps of the whole run.
            primary: whether this is the process that writes.
            throughput: turns tokens and seconds into rates.
            start_step: steps already trained (of the checkpoint that is resumed).
            memory: measures the memory figures that go into every training line.

        Raises:
            ConfigError: ``observe.dir`` cannot be created or written.
        """
        self._primary = primary
        self._step = start_step
        self._metrics: MetricsFile | None = None
        self._events: ScalarEvents | None = None
        self._folder: Path | None = None
        if not primary:
            return
        self._interval = config.log_interval
        self._total_steps = total_steps
        self._throughput = throughput
        self._memory = memory
        self._line = LogLine(total_steps, throughput)
        if config.dir is not None:
            self._folder = Path(config.dir)
            self._open_files(self._folder, start_step, config.tensorboard)
        self._console = Console(config.progress, total_steps=total_steps, start_step=start_step)
        if self._metrics is not None and self._metrics.discarded:
            self.message(
                f"metrics of steps after {start_step} and unreadable lines were moved to "
                f"metrics.discarded.jsonl: {self._metrics.discarded}"
            )

    def write_config(self, resolved: Mapping[str, Any]) -> None:
        """Write the resolved configuration to config.yaml, replacing that of an earlier start."""
        if self._primary and self._folder is not None:
            write_atomically(self._folder / CONFIG_FILE, to_yaml(dict(resolved)))

    def log_step(self, metrics: Mapping[str, Any]) -> None:
        """Record one training step.

        Args:
            metrics: the keys of :data:`STEP_KEYS` and any other scalars (``decoupled_lr``,
                ``weight_decay``, ``loss_scale``, ``num_zeros``, ``params_norm`` and ``skipped``
                also appear in the log line).
                ``loss`` [nats per token]; ``tokens``: of this step on all devices together, of
                packed rows those of documents, with ``causal_keys`` and ``full_keys``;
                ``consumed_samples`` and ``step``: counted to the end of this step;
                ``step_time_s``: wall time [s].

        Raises:
            ValueError: a key is missing, a count is not an integer, the step is not after the one
                before, or the time is not positive.
            TypeError: a value is not one number.
        """
        if not self._primary:
            return
        record: Record = {key: to_scalar(key, value) for key, value in metrics.items()}
        step, tokens, seconds = self._check(record)
        self._step = step
        record |= self._throughput.rates(tokens, seconds, Keys.of([record]))
        record |= self._memory()
        self._write(step, record)

        self._line.add(record)
        if step % self._interval == 0 or step == self._total_steps:
            self._console.line(self._line.take())
        self._console.advance(record)

    def log_eval(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record an evaluation made after training step ``step``.

        Args:
            step: training steps done.
            metrics: ``eval_loss`` [nats per token], ``eval_tokens`` (that the loss is the mean of),
                ``eval_loss/name`` of each named validation set and any other scalars.

        Raises:
            ValueError: ``eval_loss`` is missing.
            TypeError: a value is not one number.
        """
        if not self._primary:
            return
        if "eval_loss" not in metrics:
            raise ValueError("an evaluation's metrics lack eval_loss")
        record = {"step": step} | {key: to_scalar(key, value) for key, value in metrics.items()}
        self._write(step, record)
        self._console.line(evaluation_line(step, record))

    def message(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        if self._primary:
            self._console.line(text)

    def close(self) -> None:
        """Put everything on disk and close the files and the bar; harmless when called twice."""
        if not self._primary:
            return
        self._console.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the logger."""
        self.close()

    def _open_files(self, folder: Path, start_step: int, tensorboard: bool) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._metrics = MetricsFile(folder, start_step)
        except OSError as error:
            raise ConfigError(
                f"observe.dir is {str(folder)!r}, which cannot be written: {error.strerror}; "
                "give a folder that this process may create files in"
            ) from error
        if tensorboard:
            self._events = ScalarEvents(folder / TENSORBOARD_FOLDER, start_step)

    def _check(self, record: Record) -> tuple[int, int, float]:
        """The record's step, tokens and seconds, after refusing what cannot be."""
        missing = [key for key in STEP_KEYS if record.get(key) is None]
        if missing:
            raise ValueError(f"a step's metrics lack {', '.join(missing)}")
        for key in COUNT_KEYS:
            if not isinstance(record[key], int):
                raise ValueError(f"{key} is {record[key]}: expected an integer")
        step, tokens, seconds = record["step"], record["tokens"], record["step_time_s"]
        if step <= self._step:
            raise ValueError(f"step {step} logged after step {self._step}: steps only go up")
        if not seconds > 0:
            raise ValueError(f"step_time_s of step {step} is {seconds}: expected more than 0")
        return step, tokens, seconds

    def _write(self, step: int, record: Mapping[str, Scalar]) -> None:
        if self._metrics is not None:
            self._metrics.write(record)
        if self._events is not None:
            self._events.write(step, record)
