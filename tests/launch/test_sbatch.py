import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "train.sbatch"


def submit(folder, *arguments, **env):
    """Run the script as SLURM would, with an srun that prints its arguments."""
    srun = folder / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "PYTHON": "python3"} | env
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={"PATH": f"{folder}:{os.environ['PATH']}"} | env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_sbatch_script_starts_training_with_the_config_and_every_override(tmp_path):
    result = submit(tmp_path, "run.yaml", "train.steps=3", "data.split=9, 1,0")
    assert result.returncode == 0, result.stderr
    command = result.stdout.splitlines()
    assert command[command.index("python3") :] == [
        *("python3", "-u", "-m", "jaxtron.train", "--config", "run.yaml"),
        *("train.steps=3", "data.split=9, 1,0"),
    ]
    assert "--kill-on-bad-exit=1" in command


def test_sbatch_script_hands_the_cpus_per_task_on(tmp_path):
    result = submit(tmp_path, "run.yaml", SLURM_CPUS_PER_TASK="12")
    assert "--cpus-per-task=12" in result.stdout.splitlines()


def test_sbatch_script_without_a_config_says_how_to_use_it(tmp_path):
    result = submit(tmp_path)
    assert result.returncode == 2 and "CONFIG.yaml" in result.stderr


@pytest.mark.parametrize("status, requeued", [(138, True), (143, False), (2, False), (0, False)])
def test_sbatch_script_requeues_after_the_warning_of_the_time_limit_alone(
    tmp_path, status, requeued
):
    for name, line in (("srun", f"exit {status}"), ("scontrol", 'echo "scontrol $@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    result = subprocess.run(
        ["bash", str(SCRIPT), "run.yaml"],
        env=env | {"SLURM_JOB_NODELIST": "n1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.returncode == status
    assert ("scontrol requeue 7" in result.stdout) == requeued
