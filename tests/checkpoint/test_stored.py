"""Checkpoints written by earlier versions stay readable.

``stored/format_<N>.tar.gz`` was written by the first version with format N, on a mesh of eight
devices (fsdp 4, tensor 2). Never rewrite one: add the next.
"""

import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.checkpoint.meta import FORMAT_VERSION
from jaxtron.checkpoint.verify import verify_step
from tests.checkpoint.states import abstract, assert_bitwise, mesh

STORED = Path(__file__).parent / "stored"


def expected() -> dict:
    """What is in every stored checkpoint."""
    ramp = np.arange(128, dtype=np.float32)
    return {
        "params": {
            "embedding": {"weight": ramp.reshape(16, 8) / 7},
            "layers": {"weight": (ramp.reshape(2, 8, 8) - 64).astype(jnp.bfloat16)},
        },
        "opt_state": ({"count": np.int32(12)}, {"mu": ramp.reshape(16, 8) ** 2}),
        "step": np.int32(12),
    }


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_stored_checkpoint_of_each_format_is_read(tmp_path, version):
    with tarfile.open(STORED / f"format_{version}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    checkpointer = Checkpointer(CheckpointConfig(dir=str(tmp_path / "run")))
    start = checkpointer.start_point()
    got, meta = checkpointer.restore(start.step, abstract(expected(), mesh(2, 1)))
    assert_bitwise(got, expected())
    assert start.step == 12 and meta == {"consumed_samples": 96}
    assert verify_step(tmp_path / "run" / "12").problems == ()
