"""Signals to one of several processes or to all of a job step, and one that stands still (O21)."""

import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from tests.launch.two_processes import run_processes, slurm_envs
from tests.trainer.runs import BATCH, raw_config, steps


def run_pair(folder, action, **runtime):
    options = {"row": 2 * BATCH, "action": action}
    raw = raw_config(
        folder,
        parallel={"data": 2, "fsdp": 1, "data_sharding": "no_shard"},
        train={"steps": 40},
        data={
            "source": "tests.trainer.sources:acting",
            "source_options": options,
            "paths": [],
            "num_threads": 0,
        },
        runtime={"cpu_devices": 1, "heartbeat_timeout_s": 60, **runtime},
    )
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    command = ["-m", "jaxtron.train", "--config", str(folder / "config.yaml")]
    return run_processes(command, slurm_envs(2), timeout_s=240)


def test_a_signal_to_one_process_saves_the_same_step_in_both(tmp_path):
    pair = run_pair(tmp_path, "signal")
    assert [process.returncode for process in pair] == [143, 143], "\n".join(map(str, pair))
    (saved,) = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert 2 <= saved <= 5
    for process in pair:
        assert f"stopped at step {saved} (SIGTERM)" in process.stderr


@pytest.mark.parametrize("timeout_s", [20])  # longer than a compilation on a busy machine
def test_a_process_that_stands_still_is_named_by_the_other(tmp_path, timeout_s):
    other, stuck = run_pair(tmp_path, "stall", stall_timeout_s=timeout_s)
    assert other.returncode not in (0, None), other
    assert stuck.returncode not in (0, None), stuck
    assert "the job waits for process 1 on" in other.stderr, other
    assert "reading the batch of step 3" in other.stderr, other


def test_reading_processes_that_stall_and_get_the_signal_too_do_not_keep_the_run_from_a_save(
    tmp_path,
):
    """SLURM signals every process of a job step; three batches can be read."""
    raw = raw_config(
        tmp_path,
        train={"steps": 40},
        data={
            "source": "tests.trainer.sources:stalled",
            "source_options": {"row": 3 * BATCH},
            "paths": [],
            "num_workers": 2,
        },
        runtime={"cpu_devices": 1},
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "jaxtron.train", "--config", str(tmp_path / "config.yaml")]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            metrics = tmp_path / "run" / "metrics.jsonl"
            while not (metrics.exists() and len(steps(tmp_path)) >= 2):
                assert run.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            os.killpg(run.pid, signal.SIGUSR1)
            assert run.wait(30) == 128 + signal.SIGUSR1, (tmp_path / "log").read_text()
            assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]
            while True:  # until none of the group is left
                os.killpg(run.pid, 0)
                assert time.monotonic() < deadline + 40
                time.sleep(0.1)
        except ProcessLookupError:
            pass
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
