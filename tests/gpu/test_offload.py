"""optimizer.offload on a GPU: fewer device bytes, the same weights.

Run with ``pytest -m gpu tests/gpu/test_offload.py``.
"""

import jax
import numpy as np
import pytest

from jaxtron.optim import streamed
from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.forward import random_state


@pytest.mark.gpu
def test_moments_leave_the_device_and_come_back_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and peak of the step shrink by two fp32 moments; the weights after it are alike."""
    monkeypatch.setattr(streamed, "PIECE_BYTES", 2**22)
    ends, arguments, peaks, moments = [], [], [], 0
    for offload in (False, True):
        config = make_config(
            model={"hidden_size": 1024, "ffn_hidden_size": 4096, "vocab_size": 8192},
            train={"global_batch_size": 2},
            precision={"compute": "bf16"},
            optimizer={"name": "adamw", "lr": 1e-3, "min_lr": 0.0, "offload": offload},
        )
        program = Program(config, jax.devices()[:1])
        state = random_state(program, std=0.02)
        moments = 8 * sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
        batch = rows_of(program, make_batch(config))
        memory = program.train_step.lower(state, batch).compile().memory_analysis()
        arguments.append(memory.argument_size_in_bytes)
        peaks.append(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
        state, _ = program.train_step(state, batch)
        ends.append(jax.tree.map(np.asarray, state["params"]))
    assert arguments[0] - arguments[1] > 0.95 * moments
    assert peaks[0] - peaks[1] > 0.85 * moments
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
