"""The folder of a run's checkpoints: which steps are in it, and which are complete.

Layout: one folder per step, named by its number. Orbax writes into ``<step>.orbax-checkpoint-tmp``
and renames it when all is written, so a numbered folder was once complete; its manifest tells
whether it still is. A step is deleted by renaming it to ``<step>.deleted`` first, so that a killed
deletion leaves nothing that looks like a checkpoint.
"""

import dataclasses
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxtron.checkpoint.manifest import MANIFEST_FILE, misfit_files, read_manifest
from jaxtron.checkpoint.meta import META_PATH
from jaxtron.errors import CheckpointError

_STEP = re.compile(r"\d+")
_UNFINISHED = re.compile(r"(\d+)\.orbax-checkpoint-tmp.*")
_DELETED = re.compile(r"\d+\.deleted")
_REMOVE_TRIES, _REMOVE_PAUSE_S = 50, 0.1
_ADVICE = "jaxtron reads checkpoints that it has written alone"


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a checkpoint folder holds.

    Attributes:
        complete: steps that can be loaded, ascending.
        incomplete: step -> why it cannot.
    """

    complete: tuple[int, ...]
    incomplete: Mapping[int, str]

    @property
    def latest(self) -> int | None:
        """Newest complete step."""
        return self.complete[-1] if self.complete else None


def scan(directory: Path) -> Steps:
    """List the steps of a checkpoint folder; a folder that does not exist has none.

    Raises:
        CheckpointError: ``directory`` is a file, or holds checkpoints of another program.
    """
    if not directory.exists():
        return Steps((), {})
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file: expected a checkpoint folder")
    complete: list[int] = []
    incomplete: dict[int, str] = {}
    foreign = foreign_format(directory)
    for path in directory.iterdir():
        if match := _UNFINISHED.fullmatch(path.name):
            incomplete.setdefault(int(match[1]), "its save did not finish")
        elif _STEP.fullmatch(path.name) and path.is_dir():
            reason = _why_incomplete(path)
            if reason is None:
                complete.append(int(path.name))
            else:
                incomplete[int(path.name)] = reason
                foreign = foreign or foreign_format(path)
    for step in complete:
        incomplete.pop(step, None)  # a leftover of an earlier try at a step that was saved since
    if foreign and not complete:
        raise CheckpointError(f"{directory} holds {foreign}, not a jaxtron checkpoint: {_ADVICE}")
    return Steps(tuple(sorted(complete)), dict(sorted(incomplete.items())))


def locate(path: Path) -> tuple[Path, int | None]:
    """Split what a user points at into a checkpoint folder and, if it is one step's, its number.

    Raises:
        CheckpointError: nothing is there, or it is not a jaxtron checkpoint.
    """
    if not path.exists():
        if _STEP.fullmatch(path.name) and (step := int(path.name)) in scan(path.parent).incomplete:
            return path.parent, step
        raise CheckpointError(f"{path} does not exist: expected a checkpoint folder or a step's")
    if _STEP.fullmatch(path.name) and ((path / "meta").is_dir() or (path / "state").is_dir()):
        return path.parent, int(path.name)
    return path, None


def choose(directory: Path, step: int | None) -> int:
    """The step to read from a folder: ``step`` if given, else the newest complete one.

    Raises:
        CheckpointError: the folder has no complete checkpoint, or not the step asked for.
    """
    steps = scan(directory)
    if step is None:
        if steps.latest is None:
            skipped = "".join(f"; step {n}: {why}" for n, why in steps.incomplete.items())
            raise CheckpointError(f"{directory} holds no complete checkpoint{skipped}")
        return steps.latest
    if step in steps.incomplete:
        raise CheckpointError(
            f"step {step} in {directory} is incomplete: {steps.incomplete[step]}. Complete steps: "
            f"{_join(steps.complete)}"
        )
    if step not in steps.complete:
        raise CheckpointError(
            f"{directory} holds no step {step}. Complete steps: {_join(steps.complete)}"
        )
    return step


def foreign_format(path: Path) -> str | None:
    """Name of the program whose checkpoint ``path`` looks like, if it is a known other one."""
    if (path / "latest_checkpointed_iteration.txt").exists() or any(path.glob("iter_*/")):
        return "a Megatron-LM checkpoint (latest_checkpointed_iteration.txt or iter_*)"
    if any(path.glob("*.distcp")):
        return "a PyTorch distributed checkpoint (*.distcp)"
    if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
        return "Hugging Face weights (*.safetensors or pytorch_model*.bin)"
    ours = (path / META_PATH).exists() or (path / MANIFEST_FILE).exists()
    if (path / "_CHECKPOINT_METADATA").exists() and not ours:
        return "an Orbax checkpoint of another program (_CHECKPOINT_METADATA)"
    return None


def superseded(complete: Sequence[int], *, keep: int, retain_interval: int | None) -> list[int]:
    """Steps to delete so that the newest ``keep`` and multiples of ``retain_interval`` stay."""
    return [
        step
        for step in sorted(complete)[:-keep]
        if retain_interval is None or step % retain_interval != 0
    ]


def delete_step(directory: Path, step: int) -> None:
    """Remove one step; killed at any moment, it leaves no half checkpoint behind."""
    trash = directory / f"{step}.deleted"
    shutil.rmtree(trash, ignore_errors=True)
    (directory / str(step)).rename(trash)
    shutil.rmtree(trash)


def remove_leftovers(directory: Path) -> list[str]:
    """Remove what killed saves and deletions left; the names of what was removed.

    Only the one run that writes to ``directory`` may call it, while it is not saving.
    """
    removed = []
    for path in directory.iterdir():
        if _UNFINISHED.fullmatch(path.name) or _DELETED.fullmatch(path.name):
            _remove_tree(path)
            removed.append(path.name)
    return sorted(removed)


def _remove_tree(path: Path) -> None:
    """Remove a folder that threads of a failed save may still be writing in, for a short while."""
    for _ in range(_REMOVE_TRIES - 1):
        try:
            shutil.rmtree(path)
        except OSError:  # a file came or went between listing and removing
            if not path.exists():
                return
            time.sleep(_REMOVE_PAUSE_S)
        else:
            return
    shutil.rmtree(path)


def set_aside(directory: Path, step: int) -> Path:
    """Rename an incomplete numbered folder out of the way of a new save; its new path."""
    target = directory / f"{step}.incomplete"
    number = 1
    while target.exists():
        number += 1
        target = directory / f"{step}.incomplete-{number}"
    return (directory / str(step)).rename(target)


def _why_incomplete(step_dir: Path) -> str | None:
    if not (step_dir / META_PATH).exists():
        return f"it has no {META_PATH}"
    try:
        misfits = misfit_files(step_dir, read_manifest(step_dir))
    except CheckpointError as error:
        return str(error)
    return "; ".join(f"{name} {problem}" for name, problem in misfits.items()) or None


def _join(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
