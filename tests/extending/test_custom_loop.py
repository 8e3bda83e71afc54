"""The example loop trains from the public API alone."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "custom_loop.py"


def test_custom_loop_trains_on_a_mesh() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        str(REPOSITORY / "configs" / "tiny.yaml"),
        "train.steps=15",
        "model.num_layers=1",
        "parallel.tensor=2",
        "runtime.cpu_devices=4",
        "optimizer.lr=1e-2",
    ]
    environment = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines if "step " in line]
    assert len(losses) == 15
    assert losses[-1] < losses[0] - 0.2  # from ln(257) at the start
    assert lines[-1].startswith("validation: loss ")
    assert lines[-1].endswith(f"over {8 * 64} tokens")


def test_custom_loop_stays_short_and_leaves_the_trainer_out() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 60
    assert "jaxtron.trainer" not in text
