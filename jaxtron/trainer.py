"""The training loop: data, step, metrics, evaluation, checkpoints. No parallelism in it."""

import contextlib
import itertools
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.config.config import Config
from jaxtron.config.dump import to_dict
from jaxtron.config.reads import check_reads
from jaxtron.data.build import Datasets, build_datasets
from jaxtron.data.loader import batches
from jaxtron.data.order import check_order, file_fingerprints, order_digest
from jaxtron.data.source import RowDataset
from jaxtron.dynamic_program import DynamicProgram
from jaxtron.errors import ConfigError, DataError
from jaxtron.observe.logger import RunLogger
from jaxtron.observe.profiler import StepProfiler
from jaxtron.observe.throughput import Throughput
from jaxtron.parallel.context.dynamic import dynamic_context
from jaxtron.program import Program
from jaxtron.resilience.exits import Exits, Stopped
from jaxtron.resilience.watchdog import Watchdog
from jaxtron.resume import (
    SCALES,
    check_architecture,
    check_continuation,
    consumed_samples,
    run_meta,
    with_fresh_optimizer,
    with_scales,
)
from jaxtron.room import check_state, check_step
from jaxtron.state_plan import State
from jaxtron.upcycle import abstract_dense, dense_config, upcycled

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """How a launch ended.

    Attributes:
        step: steps done.
        loss: of the last step [nats per token]; None when this launch took none.
        eval_loss: of the last evaluation; None without one.
        reason: why it ended: ``finished``, ``exit_interval``, ``exit_duration_min`` or the name of
            the signal that ended it.
        skipped: steps of this launch that updated nothing (no token to train on, a gradient norm
            over ``optimizer.grad_norm_skip_threshold``, an overflow under fp16).
    """

    step: int
    loss: float | None
    eval_loss: float | None
    reason: str
    skipped: int


class Trainer:
    """Trains as the configuration says, resuming where the run's checkpoints end.

    Args:
        config: the configuration.
        devices: devices to use; default: all of the job.
    """

    def __init__(self, config: Config, devices: Sequence[jax.Device] | None = None) -> None:
        check_reads(config)
        self.config = config
        self.program = Program(config, devices)
        stage = dynamic_context(config, self.program.sizes)
        self.dynamic = None if stage is None else DynamicProgram(self.program, stage)
        self.checkpointer = Checkpointer(config.checkpoint)
        self.datasets = self._open_data()
        self.data_files = file_fingerprints(self.datasets.train)
        # Without a folder there is nothing to save: a signal ends the process at once.
        handles = config.train.exit_signal_handler and config.checkpoint.dir is not None
        self.exits = Exits(config.train, self.program.mesh, handle_signals=handles)
        self.watchdog = Watchdog(config.runtime.stall_timeout_s)

    def fit(self) -> Result:
        """Train to ``train.steps``, or until an exit condition; saves at the end."""
        with self.exits, self.watchdog:
            return self._fit()

    def _fit(self) -> Result:
        config = self.config
        check_state(self.program)
        state, start, consumed = self._start()
        logger = RunLogger(
            config.observe,
            total_steps=config.train.steps,
            primary=jax.process_index() == 0,
            throughput=Throughput.of(
                config.model, config.data.seq_length, config.observe.peak_tflops
            ),
            start_step=start,
        )
        source = contextlib.closing(self._train_batches(start, consumed))
        tracing = contextlib.closing(StepProfiler(config.observe, primary=jax.process_index() == 0))
        with self.checkpointer, logger, source as ready, tracing as profiler:
            logger.write_config(to_dict(config))
            return self._loop(ready, state, start, consumed, logger, profiler)

    @property
    def _trained(self) -> Any:
        """What places training batches and takes steps; evaluation is the program's."""
        return self.program if self.dynamic is None else self.dynamic

    # -- start ---------------------------------------------------------------------------------

    def _open_data(self) -> Datasets:
        config = self.config
        datasets = build_datasets(
            config.data,
            vocab_size=config.model.vocab_size,
            seed=config.train.seed,
            train_samples=self.program.batch_schedule.samples(config.train.steps),
            valid_samples=self._eval_samples(),
            test_samples=self._eval_samples() if config.eval.test else 0,
        )
        if config.eval.test and datasets.valid is None and not datasets.valid_sets:
            raise ConfigError(
                "eval.test is true, but the test set is evaluated with the validation sets, and "
                "there is none: give valid a share in data.split, or set data.valid_sets"
            )
        return datasets

    def _eval_samples(self) -> int | None:
        """Rows of each validation set in an evaluation; None: all of it, once."""
        evaluation = self.config.eval
        if not evaluation.enabled:
            return 0
        if evaluation.full_validation:
            return None
        return evaluation.iters * self.config.train.global_batch_size

    def _start(self) -> tuple[State, int, int]:
        """State, steps done and samples consumed at the start of this launch."""
        start = self.checkpointer.start_point()
        if start is None:
            return self.program.init_state(), 0, 0
        where = str(start.directory / str(start.step))
        meta = self.checkpointer.read_meta(start.step, directory=start.directory)
        expected = dense_config(self.config) if start.upcycle else self.config
        check_architecture(expected, meta, where)
        if not start.weights_only:
            check_continuation(self.config, meta, where, self.data_files)
        if start.upcycle:
            abstract = {"params": abstract_dense(self.program)}
            dense, _ = self.checkpointer.restore(start.step, abstract, directory=start.directory)
            state = {"params": upcycled(self.program, dense["params"])}
            return with_fresh_optimizer(self.program, state), 0, 0
        abstract = start.select(self.program.abstract_state())
        held = self.checkpointer.entries(start.step, directory=start.directory)
        for name in set(SCALES) - held:  # the run before had another precision
            abstract.pop(name, None)
        state, meta = self.checkpointer.restore(start.step, abstract, directory=start.directory)
        state = self.program.from_logical(state)
        if start.fresh_optimizer:
            state = with_fresh_optimizer(self.program, state)
        state = with_scales(self.program, state)
        if start.weights_only:
            return state, 0, 0
        consumed = consumed_samples(meta, where)
        check_order(meta, self._meta(consumed)["data_order"], where)
        return state, start.step, consumed

    def _meta(self, consumed: int) -> dict[str, Any]:
        order = order_digest(
            self.datasets.train,
            consumed,
            dataloader_type=self.config.data.dataloader_type,
            seed=self.config.train.seed,
        )
        return run_meta(self.config, consumed, order, self.data_files)

    # -- loop ----------------------------------------------------------------------------------

    def _train_batches(self, step: int, consumed: int) -> Generator[Any, None, None]:
        """Batches of the steps after ``step``, which grow as ``train.rampup_batch_size`` says."""
        for size, count in self.program.batch_schedule.rest(step, self.config.train.steps):
            with contextlib.closing(self._batches(self.datasets.train, consumed, size)) as source:
                for _ in range(count):
                    batch = next(source, None)
                    if batch is None:
                        return
                    yield batch
            consumed += size * count

    def _batches(
        self, dataset: Any, start_sample: int, size: int, *, evaluation: bool = False
    ) -> Generator[Any, None, None]:
        data = self.config.data
        rows: Sequence[int] = self.program.placement.rows_of(size)
        stage = None
        if self.dynamic is not None and not evaluation:
            rows, stage = range(size), self.dynamic.stage  # it schedules all of a step's documents
        return batches(
            dataset,
            global_batch_size=size,
            start_sample=start_sample,
            rows=rows,
            dataloader_type="single" if evaluation else data.dataloader_type,
            seed=self.config.train.seed,
            pad_last=evaluation,
            num_workers=data.num_workers,
            num_threads=data.num_threads,
            prefetch=data.prefetch,
            stage=stage,
        )

    def _loop(
        self,
        batches: Iterator[Any],
        state: State,
        start: int,
        consumed: int,
        logger: RunLogger,
        profiler: StepProfiler,
    ) -> Result:
        config, program, exits = self.config, self.program, self.exits
        trained = self._trained
        step, loss, eval_loss, skipped = start, None, None, 0
        checked: int | None = None  # rows of a step that has been found to fit
        source = exits.breakable(batches)
        ahead = self._next(source, step)
        clock = _StepClock()
        # A step whose metrics are still on the device: its number, samples to its end, its rows,
        # and what the processes say about going on.
        pending: tuple[int, int, int, Any, Any] | None = None

        def flush() -> None:
            """Wait for the dispatched step and log it."""
            nonlocal pending, loss, skipped
            if pending is None:
                return
            done_step, done_samples, rows, metrics, answer = pending
            self.watchdog.begin(f"waiting for the result of step {done_step}")
            values = {name: value.item() for name, value in jax.device_get(metrics).items()}
            exits.hear(answer)
            loss = values["loss"]
            skipped += int(values["skipped"])
            logger.log_step(
                {
                    **{name: value for name, value in values.items() if name != "real_tokens"},
                    "step": done_step,
                    "consumed_samples": done_samples,
                    "global_batch_size": rows,
                    "tokens": values.get("real_tokens", rows * config.data.seq_length),
                    "valid_tokens": values["tokens"],
                    "step_time_s": clock.lap(),
                }
            )
            pending = None

        while step < config.train.steps and exits.reason(step, start) is None:
            if isinstance(ahead, DataError):
                flush()
                raise ahead
            size = program.batch_schedule.samples(step + 1) - program.batch_schedule.samples(step)
            if size != checked:
                self.watchdog.begin(f"compiling step {step + 1}")
                check_step(program, trained.step_bytes(state, ahead))
                checked = size
                exits.hear(exits.ask(signals_only=True))  # it may have taken minutes
                if exits.signalled:
                    break
            profiler.before_step(step + 1, state)
            state, metrics = trained.train_step(state, ahead)
            profiler.after_step(step + 1, metrics)
            flush()
            step, consumed = step + 1, consumed + size
            pending = (step, consumed, size, metrics, exits.ask())
            ahead = self._next(source, step)
            last = step == config.train.steps or exits.reason(step, start) is not None
            if config.eval.interval and (
                step % config.eval.interval == 0 or (last and not exits.signalled)
            ):
                flush()
                try:
                    eval_loss = self._evaluate(state, step, logger, end=step == config.train.steps)
                except Stopped:
                    log.warning("the evaluation after step %d is left out: a signal came", step)
                clock.restart()
            if self.checkpointer.should_save(step):
                flush()
                self._save(step, state, consumed)
                clock.restart()
        flush()
        if self.checkpointer.should_save(step, final=True):
            self._save(step, state, consumed)
        with self.watchdog.paused("saving the last checkpoint"):
            self.checkpointer.wait()
        return Result(step, loss, eval_loss, exits.reason(step, start) or "finished", skipped)

    def _next(self, source: Iterator[Any], step: int) -> Any:
        """The batch that follows ``step``, on the devices; None after the last step.

        An error of the data is returned, for the loop to raise it when the batch is due: by then
        the steps before it are logged and saved.
        """
        if step >= self.config.train.steps:
            return None
        self.watchdog.begin(f"reading the batch of step {step + 1}")
        try:
            return self._trained.place(next(source))
        except Stopped:
            return None
        except DataError as error:
            return error
        except StopIteration:
            dataset = self.datasets.train
            return DataError(
                f"training data ended after step {step}: {dataset.name if dataset else 'train'} "
                f"has {len(dataset) if dataset else 0} rows, train.steps={self.config.train.steps} "
                f"of up to train.global_batch_size={self.config.train.global_batch_size} rows are "
                "asked for; use fewer steps or data.dataloader_type=cyclic"
            )

    def _save(self, step: int, state: State, consumed: int) -> None:
        with self.watchdog.paused(f"saving step {step}"):
            self.checkpointer.save(step, self.program.to_logical(state), self._meta(consumed))

    def _evaluate(
        self, state: State, step: int, logger: RunLogger, *, end: bool = False
    ) -> float | None:
        """Evaluate every validation set; returns ``eval_loss``, None without a set.

        ``eval_loss`` is the mean over the tokens of the validation split or, in a run that has only
        ``data.valid_sets``, over the tokens of all of them. At the run's ``end`` the test set is
        evaluated too.

        Raises:
            Stopped: a signal ends the launch.
        """
        main, sets = self.datasets.valid, self.datasets.valid_sets
        if main is None and not sets:
            return None
        sums = {name: self._eval_sums(dataset, state) for name, dataset in sets.items()}
        if main is not None:
            total, tokens = self._eval_sums(main, state)
        else:
            total, tokens = map(sum, zip(*sums.values()))
        metrics = {"eval_loss": total / tokens, "eval_tokens": tokens}
        for name, (set_total, set_tokens) in sums.items():
            metrics[f"eval_loss/{name}"] = set_total / set_tokens
            metrics[f"eval_tokens/{name}"] = set_tokens
        if end and self.datasets.test is not None:
            test_total, test_tokens = self._eval_sums(self.datasets.test, state)
            metrics |= {"test_loss": test_total / test_tokens, "test_tokens": test_tokens}
        logger.log_eval(step, metrics)
        return total / tokens

    def _eval_sums(self, dataset: RowDataset, state: State) -> tuple[float, int]:
        """Summed loss [nats] and tokens of the rows that each evaluation reads of a set.

        They are the first ``eval.iters`` global batches, or all of them: every evaluation sees the
        same rows, so that its curve has no sampling noise.
        """
        batches_read = None if self.config.eval.full_validation else self.config.eval.iters
        size = self.config.train.global_batch_size
        total, tokens = 0.0, 0
        with contextlib.closing(self._batches(dataset, 0, size, evaluation=True)) as source:
            for batch in self.exits.breakable(itertools.islice(source, batches_read)):
                loss, count = self.program.eval_step(state["params"], self.program.place(batch))
                answer = self.exits.ask(signals_only=True)
                self.watchdog.begin("evaluating a batch")
                total += float(loss)
                tokens += int(count)
                self.exits.hear(answer)
        if tokens == 0:
            raise DataError(f"{dataset.name}: evaluation found no token to predict")
        return total, tokens


class _StepClock:
    """Wall time from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed

    def restart(self) -> None:
        """Leave out what happened since the last lap (evaluation, saving)."""
        self._last = time.perf_counter()
