"""Where a launch takes its state from."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtron.checkpoint import steps as step_folder
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.errors import CheckpointError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StartPoint:
    """A complete checkpoint and what of it to use.

    Attributes:
        directory: its folder (absolute).
        step: its step.
        weights_only: ``finetune``: take the weights, start at step 0 with fresh data and optimizer.
        fresh_optimizer: the optimizer state is not taken.
        upcycle: the weights are those of a dense model, for one with experts.
    """

    directory: Path
    step: int
    weights_only: bool = False
    fresh_optimizer: bool = False
    upcycle: bool = False

    def select(self, abstract_state: Mapping[str, Any]) -> dict[str, Any]:
        """The top-level entries of ``abstract_state`` that come from the checkpoint."""
        if self.weights_only:
            return {"params": abstract_state["params"]}
        skipped = {"opt_state"} if self.fresh_optimizer else set()
        return {entry: tree for entry, tree in abstract_state.items() if entry not in skipped}


def find_start(config: CheckpointConfig) -> StartPoint | None:
    """The checkpoint this launch starts from; None: none was asked for and none is there.

    The run's own newest complete step wins over ``load``, so that a relaunched job goes on. When
    ``load`` names the run's own folder, it is taken at its word: that step, with those options.

    Raises:
        CheckpointError: ``load`` or its step is missing, incomplete or foreign; or it is an older
            step of the run's own folder, whose later steps would be in the way; or all checkpoints
            of the run's own folder are damaged.
    """
    directory = None if config.dir is None else Path(config.dir).absolute()
    own = step_folder.Steps((), {}) if directory is None else step_folder.scan(directory)
    if config.load is None:
        return _resume(directory, own)
    with _naming("checkpoint.load"):
        source, step_of_path = step_folder.locate(Path(config.load).absolute())
    same_folder = directory is not None and source.resolve() == directory.resolve()
    if directory is not None and not same_folder:
        _refuse_lost(directory, own)
    if directory is not None and own.latest is not None and not same_folder:
        _log.info("this run has checkpoints of its own: checkpoint.load=%s not read", config.load)
        return _resume(directory, own)
    if step_of_path is not None and config.load_step not in (None, step_of_path):
        raise CheckpointError(
            f"checkpoint.load is the folder of step {step_of_path} but checkpoint.load_step is "
            f"{config.load_step}: give the folder above it, or leave load_step out"
        )
    by_number = step_of_path is None and config.load_step is not None
    with _naming("checkpoint.load_step" if by_number else "checkpoint.load"):
        step = step_folder.choose(source, config.load_step if by_number else step_of_path)
    _log_skipped(source, step_folder.scan(source), newer_than=step)
    weights_only = config.finetune or config.moe_use_upcycling
    first = 0 if weights_only else step
    if same_folder and own.latest is not None and own.latest > first:
        raise CheckpointError(
            f"checkpoint.load asks to go on from step {first} in {directory}, which holds later "
            f"steps (up to {own.latest}): use another checkpoint.dir, or delete them with "
            f"`python -m jaxtron.checkpoint prune {directory} --after {first}`"
        )
    taken = "weights only" if weights_only else "weights and step"
    if not (weights_only or config.no_load_optim):
        taken = "the whole state"
    _log.info("starting from step %d of %s: %s", step, source, taken)
    return StartPoint(
        source,
        step,
        weights_only=weights_only,
        fresh_optimizer=weights_only or config.no_load_optim,
        upcycle=config.moe_use_upcycling,
    )


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Put the key that names a checkpoint before what is wrong with it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None


def _resume(directory: Path | None, own: step_folder.Steps) -> StartPoint | None:
    if directory is None:
        return None
    _log_skipped(directory, own, newer_than=-1 if own.latest is None else own.latest)
    _refuse_lost(directory, own)
    if own.latest is None:
        _log.info("no checkpoint in %s: starting from scratch", directory)
        return None
    _log.info("resuming from step %d in %s", own.latest, directory)
    return StartPoint(directory, own.latest)


def _refuse_lost(directory: Path, own: step_folder.Steps) -> None:
    """Refuse to begin a run anew in a folder whose checkpoints are damaged, all of them.

    A numbered folder was complete once: a save that is killed never gets that name.
    """
    if lost := [n for n in own.incomplete if own.latest is None and (directory / str(n)).is_dir()]:
        raise CheckpointError(
            f"{directory} holds no checkpoint that can be resumed, but "
            + "; ".join(f"step {n}: {own.incomplete[n]}" for n in lost)
            + ". Restore the files, or move the folder away to start from scratch"
        )


def _log_skipped(directory: Path, found: step_folder.Steps, *, newer_than: int) -> None:
    for step, reason in found.incomplete.items():
        if step > newer_than:
            _log.warning(
                "skipped incomplete checkpoint of step %d in %s: %s", step, directory, reason
            )
