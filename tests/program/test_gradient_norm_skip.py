"""A gradient norm above ``optimizer.grad_norm_skip_threshold`` changes nothing but the step."""

import jax
import numpy as np

from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.forward import random_state


def test_a_step_above_the_threshold_moves_neither_weights_nor_state() -> None:
    def program_of(threshold: float | None) -> Program:
        config = make_config(
            model={"num_layers": 1},
            train={"global_batch_size": 4},
            optimizer={"name": "adamw", "lr": 0.1, "grad_norm_skip_threshold": threshold},
        )
        return Program(config, jax.devices()[:1])

    free = program_of(None)
    rows = rows_of(free, make_batch(free.config, ragged=False))
    _, metrics = free.train_step(random_state(free), rows)
    norm = float(metrics["grad_norm"])
    assert int(metrics["skipped"]) == 0 and norm > 0

    for threshold, skipped in ((0.9 * norm, 1), (1.1 * norm, 0)):
        program = program_of(threshold)
        state = random_state(program)
        before = jax.tree.map(np.array, state)
        state, metrics = program.train_step(state, rows)
        after = jax.tree.map(np.asarray, state)
        assert int(metrics["skipped"]) == skipped
        assert (int(after["step"]), int(after["updates"])) == (1, 1 - skipped)
        same = [
            np.array_equal(a, b)
            for part in ("params", "opt_state")
            for a, b in zip(jax.tree.leaves(before[part]), jax.tree.leaves(after[part]))
        ]
        assert all(same) if skipped else not any(same)
