"""Saving a run's state and getting it back on any mesh."""

import logging
import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxtron
from jaxtron.checkpoint import steps as step_folder
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.checkpoint.digest import digest_arrays
from jaxtron.checkpoint.manifest import MANIFEST_FILE, damaged_files, read_manifest
from jaxtron.checkpoint.meta import ArrayRecord, CheckpointMeta, read_meta
from jaxtron.checkpoint.names import entry_of, named_leaves, nested, require_match, with_leaves
from jaxtron.checkpoint.start import StartPoint, find_start
from jaxtron.checkpoint.store import StateWriter, read_state
from jaxtron.errors import CheckpointError

_log = logging.getLogger(__name__)

OPTIMIZER_ENTRY = "opt_state"
_SMALL_FILE = 2**20  # bytes; checked when a read fails, to say which file is to blame
_ARRAY_DATA = re.compile(r"state/ocdbt\.process_\d+/")  # all other files of the state are its index
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_NOTE = re.compile(r" \[\w[\w ]*='[^']*'\]")  # may hold line breaks


class Checkpointer:
    """The checkpoints of one run.

    Every process of the run constructs one and makes the same calls in the same order; the folder
    is on a file system that all of them see. Only ``save`` changes the folder.

    Args:
        config: where and how.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._directory = None if config.dir is None else Path(config.dir).absolute()
        self._writer: StateWriter | None = None
        self._pending: int | None = None  # step being written
        self._last_saved: int | None = None  # newest step known to be in the folder

    @property
    def directory(self) -> Path | None:
        """Absolute path of the run's checkpoint folder; None: nothing is saved."""
        return self._directory

    def start_point(self) -> StartPoint | None:
        """Where this launch takes its state from: the run's own folder, else ``load``, else None.

        Logs which, and each incomplete step that is passed over. Makes the run's folder, so that
        one that cannot be made is known before training.

        Raises:
            CheckpointError: ``load`` was given and is missing, incomplete or foreign; or the run's
                folder cannot be made.
        """
        start = find_start(self._config)
        if self._directory is not None and jax.process_index() == 0:
            _make_folder(self._directory)
        _require_agreement(-1 if start is None else start.step, "step to start from")
        return start

    def should_save(self, step: int, *, final: bool = False) -> bool:
        """Whether the trainer is to save after ``step``: at each interval and at the end, once.

        Args:
            step: optimizer steps taken.
            final: this is the last step of this launch.
        """
        if self._directory is None or step == self._last_saved:
            return False
        due = self._config.interval > 0 and step % self._config.interval == 0
        return due or final

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Save ``state``; with ``async_save`` the writing goes on in the background.

        When it returns, the arrays may be changed or donated. The step counts as saved once it is
        committed; only then are older steps deleted.

        Args:
            step: optimizer steps taken; above every step already in the folder.
            state: top-level entries (``params``, ``opt_state``, ...) of pytrees of ``jax.Array``.
            meta: what ``restore`` and ``read_meta`` give back; JSON values.

        Raises:
            CheckpointError: the previous or this save failed, or the folder already holds this or a
                later step.
        """
        if self._directory is None:
            raise CheckpointError("nothing can be saved: checkpoint.dir is null")
        self.wait()
        self._prepare_folder(self._directory, step)
        entries = dict(state)
        if self._config.no_save_optim:
            entries.pop(OPTIMIZER_ENTRY, None)
        named = named_leaves(entries)
        record = CheckpointMeta(
            step=step,
            run=dict(meta),
            arrays={
                name: ArrayRecord(named[name].shape, str(named[name].dtype), digest)
                for name, digest in digest_arrays(named).items()
            },
            versions=_versions(),
        )
        tree = nested(named)
        if self._writer is None:
            self._writer = StateWriter(self._config, tree)
        step_dir = self._directory / str(step)
        try:
            self._writer.write(step_dir, tree, record)
        except Exception as error:
            raise _failed_save(step_dir, error) from error
        self._pending = step
        self._last_saved = step
        if not self._config.async_save:
            self.wait()

    def restore(
        self, step: int, abstract_state: Mapping[str, Any], *, directory: Path | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a saved state into the given shapes and shardings.

        The top-level entries of ``abstract_state`` are read and must match the checkpoint exactly;
        entries of the checkpoint that it lacks are not read (``{"params": ...}`` alone reads the
        weights). Names, shapes and dtypes are compared before any array is read. With
        ``checkpoint.verify`` every array's digest is compared afterwards.

        Args:
            step: a complete step.
            abstract_state: pytrees of ``jax.ShapeDtypeStruct`` with ``sharding``.
            directory: folder to read from; None: the run's own.

        Returns:
            The state in the containers of ``abstract_state``, and the ``meta`` given to ``save``.

        Raises:
            CheckpointError: the step is missing, incomplete, damaged or does not fit.
        """
        step_dir, meta = self._open(step, directory)
        wanted = named_leaves(abstract_state)
        saved = require_match(meta.arrays, wanted, str(step_dir))
        if unread := sorted({entry_of(name) for name in meta.arrays.keys() - saved.keys()}):
            _log.info("not read from %s: %s", step_dir, ", ".join(unread))
        if self._config.verify:
            _require_sound_index(step_dir)
        try:
            tree = read_state(step_dir, nested(wanted), partial=bool(unread))
        except Exception as error:
            raise _unreadable(step_dir, saved, error) from error
        named = named_leaves(tree)
        if self._config.verify:
            _require_digests(named, saved, step_dir)
        if step_dir.parent == self._directory:
            self._last_saved = step
        return dict(with_leaves(abstract_state, named)), meta.run

    def read_meta(self, step: int, *, directory: Path | None = None) -> dict[str, Any]:
        """The ``meta`` given to ``save``, without reading arrays.

        Raises:
            CheckpointError: the step is missing, incomplete, damaged or of a newer format.
        """
        return self._open(step, directory)[1].run

    def entries(self, step: int, *, directory: Path | None = None) -> set[str]:
        """The top-level entries of the state that a step holds: ``params``, ``opt_state``, ...

        Raises:
            CheckpointError: the step is missing, incomplete or foreign.
        """
        return {entry_of(name) for name in self._open(step, directory)[1].arrays}

    def wait(self) -> None:
        """Block until the last save is committed, then delete superseded steps.

        Raises:
            CheckpointError: that save failed; the message names its folder. Raised once.
        """
        if self._writer is None or self._pending is None or self._directory is None:
            return
        step, self._pending = self._pending, None
        try:
            self._writer.wait()
            if jax.process_index() == 0 and not (self._directory / str(step)).is_dir():
                # Orbax keeps silent about a background write that was cancelled.
                raise RuntimeError("the write ended without an error and without a checkpoint")
        except Exception as error:
            self._last_saved = None
            if jax.process_index() == 0:
                # What was written takes room that the disk may lack.
                try:
                    step_folder.remove_leftovers(self._directory)
                except OSError as left:  # must not hide why the save failed
                    _log.warning("what the failed save wrote cannot be removed: %s", left)
            raise _failed_save(self._directory / str(step), error) from error
        if jax.process_index() == 0 and self._config.keep is not None:
            complete = step_folder.scan(self._directory).complete
            for old in step_folder.superseded(
                complete, keep=self._config.keep, retain_interval=self._config.save_retain_interval
            ):
                step_folder.delete_step(self._directory, old)

    def close(self) -> None:
        """Wait for the last save and release threads; may be called again.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare_folder(self, directory: Path, step: int) -> None:
        """Make room for ``step``; before the first save also clean up after killed ones."""
        found = step_folder.scan(directory)
        if found.latest is not None and found.latest >= step:
            raise CheckpointError(
                f"cannot save step {step} in {directory}: it already holds step {found.latest}. "
                "Use another checkpoint.dir, or delete the newer steps with "
                f"`python -m jaxtron.checkpoint prune {directory} --after {step - 1}`"
            )
        if self._writer is not None:
            return
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("jaxtron.checkpoint.prepare_folder")
        if jax.process_index() != 0:
            return
        _make_folder(directory)
        for name in step_folder.remove_leftovers(directory):
            _log.warning("removed %s, left by a save or deletion that was killed", directory / name)
        for broken in found.incomplete:
            if (directory / str(broken)).exists():
                aside = step_folder.set_aside(directory, broken)
                _log.warning(
                    "incomplete checkpoint %s renamed to %s", directory / str(broken), aside
                )

    def _open(self, step: int, directory: Path | None) -> tuple[Path, CheckpointMeta]:
        folder = self._directory if directory is None else Path(directory).absolute()
        if folder is None:
            raise CheckpointError("nothing can be read: checkpoint.dir is null")
        step_dir = folder / str(step_folder.choose(folder, step))
        return step_dir, read_meta(step_dir)


def _make_folder(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot make checkpoint.dir {directory}: {error.strerror}"
        ) from error


def _versions() -> dict[str, str]:
    return {
        "jaxtron": jaxtron.__version__,
        "jax": jax.__version__,
        "orbax-checkpoint": version("orbax-checkpoint"),
    }


def _require_agreement(value: int, what: str) -> None:
    """Check that all processes found the same."""
    if jax.process_count() == 1:
        return
    values = np.ravel(multihost_utils.process_allgather(np.int64(value)))
    if len(set(values.tolist())) > 1:
        seen = ", ".join(f"process {i}: {v if v >= 0 else 'none'}" for i, v in enumerate(values))
        raise CheckpointError(
            f"processes disagree on the {what} ({seen}): checkpoint folders must be on a file "
            "system that every process sees"
        )


def _require_digests(
    named: dict[str, jax.Array], saved: Mapping[str, ArrayRecord], step_dir: Path
) -> None:
    digests = digest_arrays(named)
    damaged = sorted(name for name, digest in digests.items() if digest != saved[name].digest)
    if damaged:
        raise CheckpointError(
            f"{step_dir} is damaged: {len(damaged)} of {len(saved)} arrays are not what was saved: "
            f"{', '.join(damaged)}. {_another_step(step_dir)}"
        )


def _failed_save(step_dir: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"saving {step_dir} failed: {_brief(error)}. Earlier checkpoints are untouched"
    )


def _require_sound_index(step_dir: Path) -> None:
    """Compare the files that say where arrays lie, which are small, with their checksums.

    Orbax would find such damage too, but prints a traceback for each array that it gives up.

    Raises:
        CheckpointError: a file is not as it was written.
    """
    index = {
        name: record
        for name, record in read_manifest(step_dir).items()
        if name.startswith("state/") and not _ARRAY_DATA.match(name)
    }
    if problems := damaged_files(step_dir, index):
        listed = "; ".join(f"file {name} {what}" for name, what in problems.items())
        raise CheckpointError(
            f"{step_dir} is damaged: {listed} (index of its arrays). "
            f"`python -m jaxtron.checkpoint verify {step_dir}` lists what else is damaged. "
            + _another_step(step_dir)
        )


def _unreadable(
    step_dir: Path, saved: Mapping[str, ArrayRecord], error: Exception
) -> CheckpointError:
    """Name the arrays that the error speaks of and the small files that are damaged."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    text = "\n".join(map(str, chain))
    suspects = [f"array {n}" for n in sorted(saved) if f"{n.replace('/', '.')}/" in text]
    try:
        files = read_manifest(step_dir)
        small = {name: record for name, record in files.items() if record.size < _SMALL_FILE}
        suspects += [f"file {name}" for name in damaged_files(step_dir, small)]
    except (CheckpointError, OSError):
        suspects.append(f"file {MANIFEST_FILE}")
    return CheckpointError(
        f"{step_dir} cannot be read: {', '.join(suspects) or 'unknown part'}: "
        f"{_brief(chain[-1])}. `python -m jaxtron.checkpoint verify {step_dir}` lists what else is "
        f"damaged. {_another_step(step_dir)}"
    )


def _another_step(step_dir: Path) -> str:
    """What to do about a damaged step."""
    folder, step = step_dir.parent, int(step_dir.name)
    return (
        "To go on from an earlier step of the run, delete this one and later ones with "
        f"`python -m jaxtron.checkpoint prune {folder} --after {step - 1}`; to start another run "
        "from an earlier step, give checkpoint.load and checkpoint.load_step"
    )


def _brief(error: BaseException) -> str:
    """First line of an error, cut to readable length.

    TensorStore says what at its start and why at its end. Its notes in brackets (places in its
    source, settings) are left out, but for the number of the system's error, which is put in words.
    """
    text = str(error).strip()
    reasons = [os.strerror(int(number)) for number in _OS_ERROR.findall(text)]
    line = (_NOTE.sub("", text).splitlines() or [""])[0].split(" [tensorstore_spec")[0]
    line += "".join(f": {reason}" for reason in dict.fromkeys(reasons) if reason not in line)
    if len(line) > 400:
        line = f"{line[:200]} ... {line[-200:]}"
    return f"{type(error).__name__}: {line}"
