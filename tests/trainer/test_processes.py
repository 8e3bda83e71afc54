"""Two processes with four devices each train as one process does (O20)."""

import time

import numpy as np
import pytest
import yaml

from tests.launch.two_processes import run_processes, slurm_envs
from tests.trainer.process_job import ARMS, RUNTIME
from tests.trainer.runs import (
    BATCH,
    evaluations,
    raw_config,
    steps,
    train,
    write_corpus,
)

JOB = ["-m", "tests.trainer.process_job"]
FAILS_AFTER = 3  # steps of the run whose data process 1 cannot read to the end


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Six steps and evaluations in one process on one device."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder, eval={"interval": 3, "iters": 1})
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Two processes train three steps of each arm; one goes on alone; two end that run.

    The last launch ends with a run whose data process 1 cannot read to the end.
    """
    folder = tmp_path_factory.mktemp("together")
    for arm in ARMS:
        write_corpus(folder / arm)
    broken = raw_config(
        folder / "broken",
        **ARMS["fsdp-tensor"],
        data={
            "source": "tests.trainer.sources:broken",
            "source_options": {"row": FAILS_AFTER * BATCH, "process": 1},
            "paths": [],
        },
        runtime=RUNTIME,
    )
    (folder / "broken.yaml").write_text(yaml.safe_dump(broken))

    started = run_processes([*JOB, "start", str(folder)], slurm_envs(2), timeout_s=240)
    assert [f.returncode for f in started] == [0, 0], "\n".join(map(str, started))
    one = train(folder / "fsdp-tensor", parallel={"fsdp": 8}, train={"exit_interval": 4})
    assert one.step == 4
    began = time.monotonic()
    ended = run_processes([*JOB, "end", str(folder)], slurm_envs(2), timeout_s=240)
    return folder, started, ended, time.monotonic() - began


@pytest.mark.parametrize("arm", ARMS)
def test_two_processes_train_like_one(together, alone, arm):
    lines, expected = steps(together[0] / arm)[:3], steps(alone)[:3]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [line[key] for line in lines], [line[key] for line in expected], rtol=1e-5
        )
    for key in ("lr", "tokens", "valid_tokens", "consumed_samples"):
        assert [line[key] for line in lines] == [line[key] for line in expected]
    (evaluation,) = evaluations(together[0] / arm)
    assert evaluation["eval_tokens"] == evaluations(alone)[0]["eval_tokens"]
    np.testing.assert_allclose(
        evaluation["eval_loss"], evaluations(alone)[0]["eval_loss"], rtol=1e-5
    )


def test_saved_by_two_resumed_by_one_and_again_by_two(together, alone):
    """Steps 1 to 3 by two processes, 4 by one, 5 and 6 by two."""
    lines = steps(together[0] / "fsdp-tensor")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(
        [line["loss"] for line in lines], [line["loss"] for line in steps(alone)], rtol=1e-5
    )
    saved = sorted(path.name for path in (together[0] / "fsdp-tensor/checkpoints").iterdir())
    assert saved == ["3", "4", "6"]


@pytest.mark.parametrize(
    ("arm", "own"),
    [
        # Two microbatches of four rows, of which each process holds two.
        ("fsdp-tensor", ([0, 1, 4, 5], [2, 3, 6, 7])),
        ("data-fsdp", ([0, 1, 2, 3], [4, 5, 6, 7])),
    ],
)
def test_each_process_reads_only_its_rows(together, arm, own):
    for finished, rows in zip(together[1], own, strict=True):
        read = [step * BATCH + row for step in range(3) for row in rows]
        # The fourth batch is read ahead, its rows are this process's too.
        (line,) = [text for text in finished.stdout.splitlines() if text.startswith(arm)]
        seen = [int(number) for number in line.split("[")[1].rstrip("]").split(",")]
        assert set(read) <= set(seen)
        assert {index % BATCH for index in seen} == set(rows)


def test_only_the_first_process_writes_logs(together):
    first, second = together[1]
    assert "lm loss" in first.stdout + first.stderr
    assert "lm loss" not in second.stdout + second.stderr


def test_a_process_that_fails_alone_ends_the_job(together):
    """Process 1 reports its error and exits with 2; process 0 does not wait for it for ever."""
    folder, _, (other, failed), _ = together
    assert failed.returncode == 2, failed
    assert f"error: row {FAILS_AFTER * BATCH + 2} cannot be read" in failed.stderr, failed
    assert other.returncode not in (0, None), other  # None: had to be killed
    assert len(steps(folder / "broken")) <= FAILS_AFTER
