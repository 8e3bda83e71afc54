"""Gradient norm and clipping count every logical parameter once on every mesh (O10)."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.program import Program
from tests.parity.harness import assert_close_leaves, make_batch, make_config, rows_of
from tests.program.forward import random_params, random_state

MODEL = {"num_layers": 1, "qk_layernorm": True}
MESHES: dict[str, tuple[dict[str, Any], int]] = {  # with the number of microbatches
    "data8": ({"data": 8}, 1),
    "fsdp8": ({"fsdp": 8, "data_sharding": "optim_grads_params"}, 2),
    "data2-fsdp4": ({"data": 2, "fsdp": 4, "data_sharding": "optim_grads"}, 4),
    "tensor8": ({"tensor": 8}, 4),
    "data2-fsdp2-tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
}
# So large that the update, not the weight, decides how the sum of both is rounded.
LEARNING_RATE = 1e3


def config_of(parallel: dict[str, Any], microbatches: int = 1, clip_grad: float = 0.0) -> Any:
    return make_config(
        model=MODEL,
        parallel=parallel,
        train={"num_microbatches": microbatches},
        optimizer={"lr": LEARNING_RATE, "min_lr": LEARNING_RATE, "clip_grad": clip_grad},
    )


@functools.cache
def reference() -> tuple[Any, float]:
    """Gradients on one device, and NumPy's norm of them in float64."""
    config = config_of({})
    program = Program(config, jax.devices()[:1])
    batch = rows_of(program, make_batch(config))
    grads = jax.jit(program.loss_and_gradients)(random_params(program), batch)[2]
    grads = jax.tree.map(np.asarray, grads)
    squares = [np.sum(g.astype(np.float64) ** 2) for g in jax.tree.leaves(grads)]
    return grads, float(np.sqrt(sum(squares)))


@pytest.mark.parametrize("mesh", MESHES)
def test_norm_is_numpys_and_clipping_at_half_of_it_halves_the_update(mesh: str) -> None:
    grads, norm = reference()
    assert norm > 1  # the 1e-6 in the clipping coefficient does not show
    config = config_of(*MESHES[mesh], clip_grad=norm / 2)
    program = Program(config)
    state = random_state(program)
    before = jax.tree.map(np.array, state["params"])
    state, metrics = program.train_step(state, rows_of(program, make_batch(config)))
    ratio = float(metrics["grad_norm"]) / norm
    print(f"{mesh:>20}: grad_norm / reference = {ratio:.8f}")
    np.testing.assert_allclose(ratio, 1, rtol=1e-5)
    update = jax.tree.map(lambda new, old: np.asarray(new) - old, state["params"], before)
    half = jax.tree.map(lambda g: -LEARNING_RATE * g / 2, grads)
    assert_close_leaves(update, half, 1e-5, "update")
