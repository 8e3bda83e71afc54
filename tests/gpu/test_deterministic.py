"""runtime.deterministic on a GPU: fresh processes that compile anew end with the same bits.

Run with ``pytest -m gpu tests/gpu/test_deterministic.py``. The model is large enough for
matrix products that split their sums.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxtron.checkpoint.meta import read_meta
from tests.gpu.visible import visible

RAW = {
    "model": {
        "num_layers": 4,
        "hidden_size": 1024,
        "ffn_hidden_size": 3584,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "data": {"source": "synthetic", "seq_length": 2048},
    "train": {"steps": 20, "global_batch_size": 8, "micro_batch_size": 4},
    "optimizer": {"lr": 1e-3},
    "observe": {"tensorboard": False, "progress": "off"},
}


def digests(folder: Path, *overrides: str) -> dict[str, str]:
    """Digests of what a run of its own process saves after its last step."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(RAW))
    environment = dict(os.environ)
    for key in ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_COMPILATION_CACHE_DIR"):
        environment.pop(key, None)
    environment["CUDA_VISIBLE_DEVICES"] = visible(1)
    command = [sys.executable, "-m", "jaxtron.train", "--config", str(folder / "config.yaml")]
    command += [f"observe.dir={folder}", f"checkpoint.dir={folder}/checkpoints", *overrides]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    arrays = read_meta(folder / "checkpoints" / "20").arrays
    return {name: record.digest for name, record in arrays.items()}


@pytest.mark.gpu
def test_two_fresh_processes_end_with_the_same_bits(tmp_path: Path) -> None:
    first = digests(tmp_path / "first", "runtime.deterministic=true")
    second = digests(tmp_path / "second", "runtime.deterministic=true")
    assert first == second
