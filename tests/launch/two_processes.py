"""Helpers for tests with several real processes on this machine, as SLURM would start them."""

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finished:
    """What a process left: exit status (None: killed at the time limit) and its output."""

    returncode: int | None
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"exit {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def run_processes(
    arguments: Sequence[str],
    envs: Sequence[Mapping[str, str]],
    *,
    timeout_s: float,
    cwd: Path | None = None,
) -> list[Finished]:
    """Start one Python process per entry of ``envs`` at the same time and wait for all.

    Args:
        arguments: what follows ``python``: ``["-c", code]``, ``["-m", "jaxtron.train", ...]``.
        envs: variables added to this process's environment, one mapping per process. SLURM's own
            variables are not inherited.
        timeout_s: after this long all that still run are killed [seconds].
        cwd: working folder.
    """
    base = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    with tempfile.TemporaryDirectory() as folder:
        # Files, not pipes: a process must not block because nobody reads it yet.
        outputs = [(Path(folder, f"{i}.out"), Path(folder, f"{i}.err")) for i in range(len(envs))]
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                env=base | dict(env),
                stdout=out.open("w"),
                stderr=err.open("w"),
                cwd=cwd,
            )
            for env, (out, err) in zip(envs, outputs, strict=True)
        ]
        deadline = time.monotonic() + timeout_s
        codes = [_wait(process, deadline) for process in processes]
        texts = [(out.read_text(), err.read_text()) for out, err in outputs]
    return [Finished(code, *text) for code, text in zip(codes, texts, strict=True)]


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def slurm_envs(num_tasks: int, *, nodes: str = "localhost") -> list[dict[str, str]]:
    """The environments that ``srun`` gives the tasks of one step on this machine."""
    job_id = str(free_job_id())
    return [
        {
            "SLURM_JOB_ID": job_id,
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": nodes,
            "SLURM_STEP_NUM_TASKS": str(num_tasks),
            "SLURM_STEP_TASKS_PER_NODE": str(num_tasks),
            "SLURM_NTASKS": str(num_tasks),
            "SLURM_NODEID": "0",
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task),
        }
        for task in range(num_tasks)
    ]


def free_job_id() -> int:
    """A job id whose port (61440 + id mod 4096) nobody listens on."""
    while True:
        job_id = random.randrange(1, 10_000_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", 61440 + job_id % 4096))
            except OSError:
                continue
        return job_id


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
