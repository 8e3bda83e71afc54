"""Killed and failed saves: the newest complete step stays loadable, no error is swallowed."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.checkpoint import steps
from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.checkpoint.store import StateWriter
from jaxtron.checkpoint.verify import verify_step
from jaxtron.errors import CheckpointError
from tests.checkpoint.states import (
    abstract,
    assert_bitwise,
    child_environment,
    file_size_limit,
    mesh,
)


def config(path, **keys) -> CheckpointConfig:
    return CheckpointConfig(dir=str(path), **keys)


def tree(step: int, size: int = 1024) -> dict:
    values = np.random.default_rng(step).standard_normal(size, np.float32)
    return {"params": {"w": jnp.asarray(values)}, "step": jnp.int32(step)}


def resume(path, size: int = 1024) -> int | None:
    """What a relaunch does; the step it goes on from, after checking what it got."""
    checkpointer = Checkpointer(config(path))
    start = checkpointer.start_point()
    if start is None:
        return None
    like = abstract(tree(start.step, size), mesh(1, 1))
    got, _ = checkpointer.restore(start.step, like, directory=start.directory)
    assert_bitwise(got, tree(start.step, size))
    return start.step


class Snapshots:
    """Copies a folder at each file operation that Python makes below it: what a kill would leave.

    SIGKILL leaves the file system as it is at that moment, so a copy made then is what a relaunch
    would find.
    """

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self.target = folder, target
        self.active = False
        self.taken: list[Path] = []
        self._lock = threading.Lock()
        self._copying = threading.local()
        sys.addaudithook(self._hook)  # cannot be removed, only made idle

    def _hook(self, event: str, args: tuple) -> None:
        if not self.active or getattr(self._copying, "now", False):
            return
        if event in ("os.remove", "os.rmdir"):  # rmtree names files relative to an open folder
            inside = args[1] != -1 or str(args[0]).startswith(str(self.folder))
        else:
            inside = event in ("open", "os.rename", "os.mkdir") and str(args[0]).startswith(
                str(self.folder)
            )
        if not inside:
            return
        with self._lock:  # other Python threads wait at their next file operation
            self._copying.now = True
            try:
                self._copy(self.target / str(len(self.taken)))
            finally:
                self._copying.now = False

    def _copy(self, copy: Path) -> None:
        while True:  # TensorStore's threads do not wait, and may rename a file that is being copied
            try:
                shutil.copytree(self.folder, copy)
            except (shutil.Error, FileNotFoundError):
                shutil.rmtree(copy, ignore_errors=True)
            else:
                self.taken.append(copy)
                return


def test_a_kill_at_any_file_operation_leaves_a_resumable_folder(tmp_path):
    folder = tmp_path / "run"
    snapshots = Snapshots(folder, tmp_path / "snapshots")
    checkpointer = Checkpointer(config(folder, keep=1, async_save=False))
    checkpointer.save(1, tree(1), {})
    snapshots.active = True
    checkpointer.save(2, tree(2), {})  # also deletes step 1, once 2 is committed
    snapshots.active = False
    checkpointer.close()
    assert len(snapshots.taken) > 15
    resumed = [resume(copy) for copy in snapshots.taken]
    assert sorted(resumed) == resumed and set(resumed) == {1, 2}
    unfinished = [copy for copy, step in zip(snapshots.taken, resumed) if step == 1]
    # Deleting step 1 never shows a part of it under its name.
    assert all(steps.scan(copy).incomplete.keys() <= {2} for copy in snapshots.taken)
    for copy in [*unfinished[:: len(unfinished) // 4], snapshots.taken[-1]]:
        with Checkpointer(config(copy, keep=1)) as relaunched:
            relaunched.save(3, tree(3), {})
        assert [p.name for p in copy.iterdir()] == ["3"]
        assert verify_step(copy / "3").problems == ()


CHILD = """
import os, signal, sys
folder, kill_at = sys.argv[1], int(sys.argv[2])
from tests.checkpoint.test_crash import config, tree
from jaxtron.checkpoint.checkpointer import Checkpointer
checkpointer = Checkpointer(config(folder))
checkpointer.save(1, tree(1), {})
checkpointer.wait()
count = 0
def hook(event, args):
    global count
    if event in ("open", "os.rename", "os.mkdir") and str(args[0]).startswith(folder):
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
checkpointer.save(2, tree(2), {})
checkpointer.close()
print(count)
"""


def test_a_killed_process_is_resumed_and_its_step_saved_again(tmp_path, caplog):
    folder = tmp_path / "run"
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), "9"],
        env=child_environment(1),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    with caplog.at_level(logging.INFO, "jaxtron"):
        assert resume(folder) == 1
    assert "skipped incomplete checkpoint of step 2" in caplog.text
    with Checkpointer(config(folder)) as relaunched:
        relaunched.save(2, tree(2), {})
    assert resume(folder) == 2
    assert sorted(os.listdir(folder)) == ["1", "2"]


# A disk that fills up while the background thread writes.

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
BIG = 2**20  # elements; 4 MB of random floats do not fit the limit below


def test_a_failed_background_write_surfaces_at_the_next_save(tmp_path):
    checkpointer = Checkpointer(config(tmp_path, keep=1))
    checkpointer.save(1, tree(1, BIG), {})
    checkpointer.wait()
    with file_size_limit(2**20):
        checkpointer.save(2, tree(2, BIG), {})
        with pytest.raises(CheckpointError, match=rf"saving {tmp_path / '2'} failed"):
            checkpointer.save(3, tree(3, BIG), {})
    assert resume(tmp_path, BIG) == 1
    assert os.listdir(tmp_path) == ["1"]  # the failed step's files are gone
    checkpointer.save(4, tree(4, BIG), {})
    checkpointer.close()
    assert resume(tmp_path, BIG) == 4


@pytest.mark.parametrize("end", ["wait", "close"])
def test_a_failed_background_write_surfaces_at_the_end(tmp_path, end):
    checkpointer = Checkpointer(config(tmp_path))
    with file_size_limit(2**20):
        checkpointer.save(2, tree(2, BIG), {})
        with pytest.raises(CheckpointError, match=rf"saving {tmp_path / '2'} failed"):
            getattr(checkpointer, end)()
    checkpointer.close()
    assert steps.scan(tmp_path).latest is None


def test_files_that_come_while_a_failed_save_is_removed_do_not_hide_its_error(
    tmp_path, monkeypatch
):
    """Orbax's other threads go on writing for a moment after the first of them has failed."""
    remove, busy = shutil.rmtree, [2]

    def rmtree(path, *args, **keys):
        if busy[0]:
            busy[0] -= 1
            raise OSError(errno.ENOTEMPTY, "Directory not empty", "d")
        remove(path, *args, **keys)

    checkpointer = Checkpointer(config(tmp_path))
    with file_size_limit(2**20):
        checkpointer.save(2, tree(2, BIG), {})
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(CheckpointError, match=rf"saving {tmp_path / '2'} failed"):
            checkpointer.wait()
    assert busy == [0] and os.listdir(tmp_path) == []


def test_a_write_that_ends_without_a_checkpoint_is_a_failed_save(tmp_path, monkeypatch):
    monkeypatch.setattr(StateWriter, "write", lambda *_: None)
    checkpointer = Checkpointer(config(tmp_path))
    checkpointer.save(2, tree(2), {})
    with pytest.raises(CheckpointError, match="failed: .*without a checkpoint"):
        checkpointer.wait()
    assert checkpointer.should_save(2, final=True)


def test_a_failed_blocking_write_surfaces_at_once(tmp_path):
    checkpointer = Checkpointer(config(tmp_path, async_save=False))
    with file_size_limit(2**20), pytest.raises(CheckpointError, match=r"failed: .*File too large"):
        checkpointer.save(2, tree(2, BIG), {})
    assert checkpointer.should_save(2, final=True)  # it is not counted as saved
    checkpointer.close()


def test_a_full_disk_is_named_however_the_library_words_it(tmp_path, monkeypatch):
    """TensorStore's versions add notes in brackets, and some the error's number alone."""
    places = "".join(f"tensorstore/internal/os/file_{n}.cc:{n}\n" for n in range(40))
    error = (
        f'OUT_OF_RANGE: Error writing "params.w/c/0": Failed to write to "/{"d/" * 99}"'
        f" [source locations='{places}'] [os_error_code='{errno.ENOSPC}']"
    )

    def write(*_):
        raise ValueError(error)

    monkeypatch.setattr(StateWriter, "write", write)
    with (
        Checkpointer(config(tmp_path)) as checkpointer,
        pytest.raises(CheckpointError) as raised,
    ):
        checkpointer.save(2, tree(2), {})
    text = str(raised.value)
    assert f"saving {tmp_path / '2'} failed" in text and "No space left on device" in text
    assert 'Error writing "params.w/c/0"' in text and "source locations" not in text
    assert len(text) < 700 and "\n" not in text


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(config(tmp_path / "file" / "run"))
    for call in (checkpointer.start_point, lambda: checkpointer.save(1, tree(1), {})):
        with pytest.raises(CheckpointError, match=r"file/run: Not a directory"):
            call()


# Folders that are there but are not complete checkpoints.


def test_an_incomplete_numbered_folder_is_skipped_and_set_aside(tmp_path, caplog):
    with Checkpointer(config(tmp_path)) as checkpointer:
        checkpointer.save(1, tree(1), {})
        checkpointer.save(2, tree(2), {})
    shutil.rmtree(tmp_path / "2" / "state")
    with caplog.at_level(logging.INFO, "jaxtron"):
        assert resume(tmp_path) == 1
    assert "skipped incomplete checkpoint of step 2" in caplog.text and "state/" in caplog.text
    with pytest.raises(CheckpointError, match=r"step 2 .* is incomplete.*Complete steps: 1"):
        Checkpointer(config(tmp_path)).read_meta(2)
    with Checkpointer(config(tmp_path)) as relaunched:
        relaunched.save(2, tree(2), {})
    assert resume(tmp_path) == 2
    assert (tmp_path / "2.incomplete").is_dir()  # a person may want what is left of it


def test_an_unfinished_step_asked_for_by_number_is_refused(tmp_path):
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"step 5 .* incomplete: its save did not finish"):
        Checkpointer(config(tmp_path)).read_meta(5)


def test_reading_leaves_unfinished_folders_alone(tmp_path):
    # Another process may be writing them.
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    reader = Checkpointer(config(tmp_path))
    assert reader.start_point() is None
    reader.close()
    assert steps.scan(tmp_path).incomplete == {5: "its save did not finish"}
