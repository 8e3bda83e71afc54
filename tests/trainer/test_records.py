"""What a run leaves behind: metrics.jsonl, config.yaml."""

import math
import re

import numpy as np
import pytest

from jaxtron.config.load import load_config
from jaxtron.errors import DataError
from tests.trainer.runs import (
    BATCH,
    SEQ,
    evaluations,
    make_config,
    make_trainer,
    saved_digests,
    steps,
    train,
)

REQUIRED = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "consumed_samples",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "tflops_per_gpu_full_attention",
    "mfu",
}


def test_one_line_a_step_with_every_key_also_after_a_resume(tmp_path):
    sections = {
        "checkpoint": {"interval": 2},
        "observe": {"peak_tflops": 1.0, "tensorboard": True},
        "eval": {"interval": 4, "iters": 1},
    }
    # Ends after step 5 without its checkpoint, as a killed run does; resumed at 4.
    train(tmp_path, **sections, train={"exit_interval": 5})
    (tmp_path / "checkpoints" / "5").rename(tmp_path / "gone")
    train(tmp_path, **sections)

    lines = steps(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert line.keys() >= REQUIRED
        assert all(math.isfinite(line[key]) for key in REQUIRED)
        assert line["tokens"] == line["valid_tokens"] == BATCH * SEQ
        assert line["consumed_samples"] == line["step"] * BATCH
        speed = line["tokens"] / line["step_time_s"] / 8  # devices of the job
        np.testing.assert_allclose(line["tokens_per_s_per_gpu"], speed, rtol=1e-6)
        assert line["mfu"] == line["tflops_per_gpu"]
    assert [line["step"] for line in evaluations(tmp_path)] == [4, 6]
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_plans_of_the_embedding_and_of_weight_decay_are_in_the_records_and_lines(tmp_path, capsys):
    train(
        tmp_path,
        train={"steps": 4},
        optimizer={
            "lr": 0.01,
            "min_lr": 0.001,
            "lr_warmup_steps": 1,
            "lr_decay_steps": 4,
            "lr_decay_style": "linear",
            "decoupled_lr": 0.02,
            "decoupled_min_lr": 0.005,
            "weight_decay_incr_style": "linear",
            "start_weight_decay": 0.1,
            "end_weight_decay": 0.5,
        },
    )
    lines = steps(tmp_path)
    for name, values in {
        "lr": [0, 0.01, 0.007, 0.004],
        "decoupled_lr": [0, 0.02, 0.015, 0.01],
        "weight_decay": [0.1, 0.2, 0.3, 0.4],
    }.items():
        np.testing.assert_allclose([line[name] for line in lines], values, rtol=1e-6, atol=0)
    *_, last = capsys.readouterr().out.splitlines()
    [printed] = re.findall(r"decoupled learning rate: (\S+) \| weight decay: (\S+)", last)
    np.testing.assert_allclose([float(word) for word in printed], [0.01, 0.4], rtol=1e-6)


def test_the_written_configuration_reproduces_the_run(tmp_path):
    train(tmp_path, train={"exit_interval": 2})
    written = tmp_path / "run" / "config.yaml"
    config = load_config(
        written,
        [f"checkpoint.dir={tmp_path / 'again'}", f"observe.dir={tmp_path / 'copy' / 'run'}"],
    )
    assert load_config(written) == make_config(tmp_path, train={"exit_interval": 2})
    make_trainer(config).fit()
    keys = ("step", "loss", "grad_norm", "lr", "consumed_samples")
    first, second = (
        [[r[k] for k in keys] for r in steps(f)] for f in (tmp_path, tmp_path / "copy")
    )
    assert first == second
    (tmp_path / "again").rename(tmp_path / "copy" / "checkpoints")
    assert saved_digests(tmp_path / "copy", 2) == saved_digests(tmp_path, 2)


def test_steps_before_bad_data_are_logged_and_saved(tmp_path):
    """Row 40 belongs to step 6: the checkpoint due at step 5 is written before the run fails."""
    broken = {
        "source": "tests.trainer.sources:broken",
        "source_options": {"row": 40},
        "paths": [],
    }
    with pytest.raises(DataError, match="row 40 cannot be read"):
        train(tmp_path, data=broken, checkpoint={"interval": 5})
    assert [line["step"] for line in steps(tmp_path)] == [1, 2, 3, 4, 5]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["5"]


@pytest.mark.parametrize(
    ("chosen", "ends", "held"), [([2, 3], {}, "2 to 3"), ([3, 9], {"exit_interval": 4}, "3 to 4")]
)
def test_chosen_steps_are_traced_also_of_a_run_that_ends_among_them(
    chosen, ends, held, tmp_path, caplog
):
    folder = tmp_path / "observed"
    with caplog.at_level("INFO"):
        train(tmp_path, observe={"dir": str(folder), "profile_steps": chosen}, train=ends)
    assert len(list((folder / "profile").rglob("*.xplane.pb"))) == 1
    assert f"trace of steps {held} written to {folder / 'profile'}" in caplog.text
