"""Dropout masks through the whole model differ wherever they should (O12)."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.program import Program
from tests.parity.harness import assert_close_leaves, make_batch, make_config, rows_of
from tests.program.forward import hidden, random_params

LAYERS, WIDTH, SEQ, ROWS = 2, 64, 16, 4
SITES = 1 + 2 * LAYERS  # the embedding; attention and MLP of every layer
RATE = 0.5


def masks(program: Program, step: int) -> np.ndarray:
    """Which elements stay, ``[site, row, position, feature]``, read from the final hidden states.

    Every weight is zero but that site k adds the constant 2^k / 2, through its bias (the embedding
    through its table). At rate 0.5 dropout doubles what stays, so the residual stream ends as an
    integer whose bit k is the mask of site k. An epsilon that dwarfs the stream turns the final
    norm into a known factor.
    """
    params = jax.tree.map(lambda a: np.zeros(a.shape, np.float32), program.model.shapes)
    params["embedding"]["word"][:] = 0.5
    for layer in range(LAYERS):
        params["layers"]["attention"]["output_bias"][layer] = 2.0 ** (2 * layer)
        params["layers"]["mlp"]["down_bias"][layer] = 2.0 ** (2 * layer + 1)
    params["final_norm"]["weight"][:] = 1
    params = jax.tree.map(jax.device_put, params, program.state_shardings["params"])
    tokens = np.zeros((ROWS, SEQ), np.int32)
    batch = {"tokens": tokens, "labels": tokens, "loss_mask": np.ones((ROWS, SEQ), np.float32)}
    stream = hidden(program, params, batch, step) * np.sqrt(program.config.model.layernorm_epsilon)
    bits = np.rint(stream).astype(np.int64)
    np.testing.assert_allclose(stream, bits, atol=1e-2)
    assert bits.min() >= 0 and bits.max() < 2**SITES
    return np.stack([bits >> site & 1 for site in range(SITES)])


@pytest.fixture(scope="module")
def program() -> Program:
    config = make_config(
        model={
            "num_layers": LAYERS,
            "hidden_dropout": RATE,
            "add_bias_linear": True,
            "layernorm_epsilon": 1e12,
        },
        parallel={"fsdp": 2, "tensor": 2},
        train={"global_batch_size": ROWS, "num_microbatches": 2},
    )
    return Program(config, jax.devices()[:4])


def test_rows_layers_sites_steps_and_positions_draw_different_masks(program: Program) -> None:
    drawn = np.stack([masks(program, step) for step in (0, 1)])  # [step, site, row, seq, feature]
    keep = drawn.mean()
    assert abs(keep - (1 - RATE)) < 4 * np.sqrt(RATE * (1 - RATE) / drawn.size)
    by_draw = drawn.reshape(-1, SEQ * WIDTH)
    assert len(by_draw) == 2 * SITES * ROWS
    # independent masks agree on half of the elements
    bound = 5 * np.sqrt(0.25 / (SEQ * WIDTH))
    for one, other in itertools.combinations(by_draw, 2):
        assert abs(np.mean(one == other) - 0.5) < bound
    by_position = by_draw.reshape(-1, WIDTH)
    assert len(np.unique(by_position, axis=0)) == len(by_position)


def test_the_same_step_draws_the_same_masks(program: Program) -> None:
    np.testing.assert_array_equal(masks(program, 3), masks(program, 3))


def test_recomputation_draws_the_same_masks() -> None:
    """Recomputing with other masks would change the gradients by their own size."""
    results: list[Any] = []
    for loop, recompute in (
        ("scan", "none"),
        ("scan", "selective"),
        ("scan", "full"),
        ("unroll", "full"),
    ):
        config = make_config(
            model={"num_layers": 2, "hidden_dropout": 0.3, "attention_dropout": 0.3},
            train={"global_batch_size": 4, "layer_loop": loop, "recompute": recompute},
        )
        program = Program(config, jax.devices()[:1])
        batch = rows_of(program, make_batch(config))
        loss, _, grads = jax.jit(program.loss_and_gradients)(random_params(program), batch, 5)
        results.append((float(loss), jax.tree.map(np.asarray, grads)))
    for loss, grads in results[1:]:
        np.testing.assert_allclose(loss, results[0][0], rtol=1e-6)
        assert_close_leaves(grads, results[0][1], 2e-6, "gradient")
