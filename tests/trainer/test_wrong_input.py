"""Wrong input to ``python -m jaxtron.train``: exit status 2 and one clear error, no traceback."""

import io
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml

from jaxtron import train as train_verb
from jaxtron.cli import run
from jaxtron.data.indexed import IndexedDataset
from tests.trainer.runs import VOCAB, raw_config, write_corpus


@pytest.fixture(autouse=True)
def _root_logger():
    """The verb sets up logging for its process; here that is taken back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def launch(folder, capsys, *overrides, **sections):
    """Exit status and stderr of the verb on a configuration file."""
    file = folder / "config.yaml"
    if not file.exists():
        file.write_text(yaml.safe_dump(raw_config(folder, **sections)))
    status = run(train_verb.main, ["--config", str(file), "parallel.fsdp=-1", *overrides])
    return status, capsys.readouterr().err


def assert_refused(outcome, *parts):
    status, stderr = outcome
    assert status == 2, stderr
    assert "Traceback" not in stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    message = stderr[stderr.index("error: ") :]
    for part in parts:
        assert part in message, message


def test_missing_configuration_file(tmp_path, capsys):
    status = run(train_verb.main, ["--config", str(tmp_path / "absent.yaml")])
    assert_refused((status, capsys.readouterr().err), str(tmp_path / "absent.yaml"))


def test_unknown_key_names_its_neighbours(tmp_path, capsys):
    assert_refused(launch(tmp_path, capsys, "optimizer.learning_rat=1"), "optimizer.learning_rat")
    assert_refused(launch(tmp_path, capsys, "train.step=1"), "train.step", "train.steps")


def test_combination_that_cannot_work(tmp_path, capsys):
    write_corpus(tmp_path)
    assert_refused(launch(tmp_path, capsys, "parallel.tensor=3"), "tensor")
    assert not (tmp_path / "run").exists()


def test_missing_data(tmp_path, capsys):
    assert_refused(launch(tmp_path, capsys), str(tmp_path / "corpus"))
    assert not (tmp_path / "run").exists()


def test_truncated_bin(tmp_path, capsys):
    path = write_corpus(tmp_path) + ".bin"
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.truncate(size - 1)
    assert_refused(launch(tmp_path, capsys), path, str(size), str(size - 1))
    assert not (tmp_path / "run").exists()


def test_id_outside_the_vocabulary(tmp_path, capsys):
    """Id 64 stands in the last document; the model has ids 0 to 63."""
    write_corpus(tmp_path, documents=20, largest_id=VOCAB)
    outcome = launch(tmp_path, capsys, data={"split": "1"})
    assert_refused(outcome, str(tmp_path / "corpus"), "document 20", "id 64", "0 to 63")


def test_id_outside_the_vocabulary_read_by_a_worker_process(tmp_path, capsys):
    write_corpus(tmp_path, documents=20, largest_id=VOCAB)
    outcome = launch(tmp_path, capsys, data={"split": "1", "num_workers": 1})
    assert_refused(outcome, str(tmp_path / "corpus"), "document 20", "id 64", "0 to 63")


def test_real_process_reports_and_exits_with_2(tmp_path):
    write_corpus(tmp_path)
    (tmp_path / "corpus.bin").write_bytes(b"")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(raw_config(tmp_path, parallel={"fsdp": -1})))
    finished = subprocess.run(
        [sys.executable, "-m", "jaxtron.train", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert_refused((finished.returncode, finished.stderr), str(tmp_path / "corpus.bin"), "0")
    assert finished.stdout == ""


FAILS_WHEN_TRACED = """
import sys
from jaxtron import train
from jaxtron.cli import run
from jaxtron.program import Program

def fail(*_):
    raise RuntimeError("no such kernel")

Program._train_step = fail
if __name__ == "__main__":
    sys.exit(run(train.main, sys.argv[1:]))
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_ends_with_the_error_that_nobody_expected(tmp_path, workers):
    """Its data is still being read ahead then."""
    write_corpus(tmp_path)
    file, script = tmp_path / "config.yaml", tmp_path / "fails.py"
    file.write_text(yaml.safe_dump(raw_config(tmp_path, parallel={"fsdp": -1})))
    script.write_text(FAILS_WHEN_TRACED)
    finished = subprocess.run(
        [sys.executable, str(script), "--config", str(file), f"data.num_workers={workers}"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert finished.returncode == 1
    assert "\nRuntimeError: no such kernel\n" in finished.stderr
    assert "Exception ignored" not in finished.stderr


def test_documents_of_the_corpus_are_what_the_tests_say(tmp_path):
    """Guards the two tests above."""
    dataset = IndexedDataset(write_corpus(tmp_path, documents=20, largest_id=VOCAB))
    assert dataset.num_documents == 21
    assert np.unique(dataset[20]).tolist() == [VOCAB]


def test_a_failed_write_is_told_without_the_tracebacks_of_orbaxs_threads():
    logger, text = logging.Logger("absl"), io.StringIO()
    logger.addHandler(logging.StreamHandler(text))
    logger.addFilter(train_verb._without_traceback)
    try:
        raise ValueError("no space left")
    except ValueError as error:
        logger.exception("background write failed: %s", error)
    assert text.getvalue() == "background write failed: no space left\n"
