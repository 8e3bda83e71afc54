"""The command line on a folder with three steps."""

import json
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.checkpoint.__main__ import main
from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.cli import run
from tests.checkpoint.states import child_environment, flip_bit


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli")
    weights = np.random.default_rng(0).standard_normal((40, 32), np.float32)
    with Checkpointer(CheckpointConfig(dir=str(path), keep=None)) as checkpointer:
        for step in (1, 2, 3):
            params = {"layer": {"w": jnp.asarray(weights * step)}}
            checkpointer.save(step, {"params": params}, {"consumed_samples": 64 * step})
    return path


@pytest.fixture
def folder(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def test_list_shows_complete_and_incomplete_steps(folder, capsys):
    (folder / "4.orbax-checkpoint-tmp").mkdir()
    assert main(["list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "1", "2", "3", "4"]
    assert lines[2].split()[-1] == "128" and "incomplete" in lines[4]


def test_show_prints_arrays_and_the_trainers_record(folder, capsys):
    assert main(["show", str(folder), "--step", "2"]) == 0
    shown = capsys.readouterr().out
    assert "float32[40, 32]  params/layer/w" in shown
    assert "parameters      1,280" in shown and "consumed_samples: 128" in shown


def test_show_json_is_the_newest_steps_record(folder, capsys):
    assert main(["show", str(folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["step"] == 3 and record["arrays"]["params/layer/w"]["shape"] == [40, 32]


def test_a_model_digest_tells_equal_weights_from_others(folder, tmp_path, capsys):
    assert main(["list", str(folder)]) == 0
    digests = [line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(set(digests)) == 3


def test_verify_passes_a_sound_folder(folder, capsys):
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("sound") == 3


def test_verify_names_the_damaged_array_and_fails(folder, capsys):
    data = max((folder / "2").rglob("d/*"), key=lambda path: path.stat().st_size)
    flip_bit(data, data.stat().st_size // 2)
    assert main(["verify", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "step 2: array params/layer/w" in printed and "step 2: DAMAGED" in printed
    assert "step 1: sound" in printed and "step 3: sound" in printed
    assert main(["verify", str(folder), "--step", "1"]) == 0
    assert main(["verify", str(folder / "2")]) == 1


def test_verify_fails_on_a_missing_file(folder, capsys):
    (folder / "2" / "state" / "manifest.ocdbt").unlink()
    assert main(["verify", str(folder)]) == 1
    assert "file state/manifest.ocdbt cannot be read" in capsys.readouterr().out


def test_prune_keeps_the_newest(folder, capsys):
    assert main(["prune", str(folder), "--keep", "1", "--dry-run"]) == 0
    assert len(list(folder.iterdir())) == 3
    assert main(["prune", str(folder), "--keep", "1"]) == 0
    assert [path.name for path in folder.iterdir()] == ["3"]
    assert "deleted step 2" in capsys.readouterr().out


def test_prune_after_a_step_deletes_the_newer(folder):
    assert main(["prune", str(folder), "--after", "1"]) == 0
    assert [path.name for path in folder.iterdir()] == ["1"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["list", "nowhere"], "nowhere does not exist"),
        (["show", "RUN", "--step", "9"], "holds no step 9. Complete steps: 1, 2, 3"),
        (["verify", "RUN", "--step", "9"], "holds no step 9"),
        (["prune", "RUN", "--keep", "0"], "--keep is 0"),
    ],
)
def test_what_is_not_there_is_an_error_with_status_2(folder, capsys, arguments, message):
    assert run(main, [str(folder) if a == "RUN" else a for a in arguments]) == 2
    assert message in capsys.readouterr().err


def test_it_runs_as_a_module_and_helps_with_examples():
    command = [sys.executable, "-m", "jaxtron.checkpoint", "verify", "--help"]
    shown = subprocess.run(
        command, env=child_environment(1), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "example: python -m jaxtron.checkpoint verify" in shown
