"""runtime.deterministic: two processes that know nothing of each other end with the same bits."""

import subprocess
import sys
from pathlib import Path

import yaml

from tests.trainer.runs import make_config, raw_config, saved_digests

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def run(folder: Path, corpus: str) -> dict[str, str]:
    """Digests of the state that a run of its own process saves."""
    folder.mkdir()
    raw = raw_config(
        folder,
        data={"paths": [corpus]},
        parallel={"fsdp": 2, "tensor": 2},
        train={"steps": 3, "num_microbatches": 2},
        runtime={"cpu_devices": 4, "deterministic": True},
    )
    raw["model"] |= DROPOUT
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "jaxtron.train", "--config", str(folder / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return saved_digests(folder, 3)


def test_two_fresh_processes_end_with_the_same_bits(tmp_path: Path) -> None:
    make_config(tmp_path)  # writes the corpus
    corpus = str(tmp_path / "corpus")
    first, second = (run(tmp_path / name, corpus) for name in ("first", "second"))
    assert first == second and len(first) > 20
