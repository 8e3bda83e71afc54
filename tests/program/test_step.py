"""The training step compiles once, gives its old state away and keeps nothing (O23)."""

import jax
import numpy as np

from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.forward import random_state


def test_steps_and_evaluations_compile_once_and_leave_no_arrays() -> None:
    config = make_config(
        model={"num_layers": 1},
        parallel={"fsdp": 2, "tensor": 2},
        train={"global_batch_size": 8, "steps": 20},
        optimizer={"name": "adamw", "lr_decay_style": "cosine", "min_lr": 0.0},
    )
    program = Program(config, jax.devices()[:4])
    state = random_state(program)
    live, rates = {}, []
    for step in range(20):
        old = state
        state, metrics = program.train_step(state, rows_of(program, make_batch(config, step)))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old["params"]))
        rates.append(float(metrics["lr"]))
        if step in (4, 9):
            program.eval_step(state["params"], rows_of(program, make_batch(config)))
        del old, metrics
        live[step] = sum(array.nbytes for array in jax.live_arrays())
    assert live[19] == live[5]
    assert program.train_step._cache_size() == program.eval_step._cache_size() == 1
    assert int(state["step"]) == int(state["updates"]) == 20
    # cosine from 0.1 at update 0 to 0 at update 20, by the count of updates before the step
    expected = [0.05 * (1 + np.cos(np.pi * n / 20)) for n in range(20)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
