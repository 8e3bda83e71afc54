"""optimizer.offload on a GPU: fewer device bytes, the same weights.

Run with ``pytest -m gpu tests/gpu/test_offload.py``.
"""

import jax
import numpy as np
import pytest

from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.forward import random_state


@pytest.mark.gpu
def test_moments_leave_the_device_between_updates() -> None:
    """Arguments of the step shrink by two fp32 moments, and the weights after it are alike."""
    ends, arguments, moments = [], [], 0
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
        state, _ = program.train_step(state, batch)
        ends.append(jax.tree.map(np.asarray, state["params"]))
    assert arguments[0] - arguments[1] > 0.95 * moments
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
