"""Two processes with four devices each train as one process does (O20)."""

import numpy as np
import pytest
import yaml

from tests.launch.two_processes import run_processes, slurm_envs
from tests.trainer.process_job import REPLICATED, RUNTIME
from tests.trainer.runs import (
    BATCH,
    evaluations,
    raw_config,
    steps,
    train,
    write_corpus,
)

JOB = ["-m", "tests.trainer.process_job"]
FAILS_AFTER = 4  # steps of the run whose data process 1 cannot read to the end


def broken_data(process):
    options = {"row": FAILS_AFTER * BATCH, "process": process}
    source = "tests.trainer.sources:broken"
    return {"source": source, "source_options": options, "paths": []}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Six steps and two evaluations in one process on one device."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder, eval={"interval": 3, "iters": 1})
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Two processes train steps 1 to 3 on fsdp 4 x tensor 2, one process 4, two again 5 and 6.

    The second pair then runs the verb on data 2 x fsdp 4, where process 1 fails.
    """
    folder = tmp_path_factory.mktemp("together")
    write_corpus(folder)
    broken = raw_config(folder / "broken", **REPLICATED, data=broken_data(1), runtime=RUNTIME)
    (folder / "broken.yaml").write_text(yaml.safe_dump(broken))

    started = run_processes([*JOB, "start", str(folder)], slurm_envs(2), timeout_s=240)
    assert [f.returncode for f in started] == [0, 0], "\n".join(map(str, started))
    assert train(folder, parallel={"fsdp": 8}, train={"exit_interval": 4}).step == 4
    ended = run_processes([*JOB, "end", str(folder)], slurm_envs(2), timeout_s=240)
    return folder, started, ended


def test_two_processes_train_like_one(together, alone):
    lines, expected = steps(together[0])[:3], steps(alone)[:3]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [line[key] for line in lines], [line[key] for line in expected], rtol=1e-5
        )
    for key in ("lr", "tokens", "valid_tokens", "consumed_samples"):
        assert [line[key] for line in lines] == [line[key] for line in expected]
    actual, reference = evaluations(together[0])[0], evaluations(alone)[0]
    assert (actual["step"], actual["eval_tokens"]) == (3, reference["eval_tokens"])
    np.testing.assert_allclose(actual["eval_loss"], reference["eval_loss"], rtol=1e-5)


def test_saved_by_two_resumed_by_one_and_again_by_two(together, alone):
    lines = steps(together[0])
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(
        [line["loss"] for line in lines], [line["loss"] for line in steps(alone)], rtol=1e-5
    )
    saved = sorted(path.name for path in (together[0] / "checkpoints").iterdir())
    assert saved == ["3", "4", "6"]


def test_each_process_reads_only_its_rows(together):
    _, started, ended = together
    # The batch after the last step is read ahead when the launch stops before the run's end.
    for finished, launch_steps in ((started, range(4)), (ended, range(4, 6))):
        for process, rows in zip(finished, ([0, 1, 4, 5], [2, 3, 6, 7]), strict=True):
            (line,) = [x for x in process.stdout.splitlines() if x.startswith("read ")]
            wanted = {step * BATCH + row for step in launch_steps for row in rows}
            seen = {int(number) for number in line[len("read [") : -1].split(",")}
            # Reading ahead may have gone further, never to rows of the other process.
            assert wanted <= seen
            assert min(seen) == min(wanted)
            assert {index % BATCH for index in seen} == set(rows)


def test_only_the_first_process_writes_logs(together):
    for first, second in together[1:]:
        assert "lm loss" in first.stdout + first.stderr
        assert "lm loss" not in second.stdout + second.stderr


def test_a_process_that_fails_alone_ends_the_job(together):
    """Process 1 reports its error and exits with 2; process 0 does not wait for it for ever."""
    other, failed = together[2]
    assert failed.returncode == 2, failed
    first_own_row = FAILS_AFTER * BATCH + BATCH // 2
    assert failed.stderr.strip().endswith(f"error: row {first_own_row} cannot be read"), failed
    assert other.returncode not in (0, None), other  # None: had to be killed


def test_steps_before_the_failure_are_those_of_one_process(together, tmp_path):
    """On data 2 x fsdp 4 with parameters sharded; the last step's metrics may be lost."""
    train(tmp_path, data=broken_data(7), train={"exit_interval": FAILS_AFTER})
    lines, expected = steps(together[0] / "broken"), steps(tmp_path)
    assert FAILS_AFTER - 1 <= len(lines) <= FAILS_AFTER
    for line, reference in zip(lines, expected):
        np.testing.assert_allclose(line["loss"], reference["loss"], rtol=1e-5)
        np.testing.assert_allclose(line["grad_norm"], reference["grad_norm"], rtol=1e-5)
        assert line["valid_tokens"] == reference["valid_tokens"] < BATCH * 16
