"""What the loss is a mean of, and tokens, microbatches and batches without any loss (O08)."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.program import Program
from tests.parity.harness import (
    assert_close_leaves,
    assert_replicas_equal,
    make_batch,
    make_config,
    rows_of,
)
from tests.program.forward import random_params, random_state

ADAMW = {"name": "adamw", "lr": 0.1, "weight_decay": 0.1}


def lookup_params(program: Program, logits_of_token: np.ndarray) -> Any:
    """Parameters with which token t predicts from the logits ``logits_of_token[t]``.

    Blocks add nothing, embeddings are far apart unit directions, and the final norm scales every
    one of them to sqrt(h): the output weight holds the logits, divided by that.
    """
    tokens, vocab = logits_of_token.shape
    params = jax.tree.map(np.array, random_params(program))
    params["layers"]["attention"]["output"] *= 0
    params["layers"]["mlp"]["down"] *= 0
    params["final_norm"]["weight"] = np.ones_like(params["final_norm"]["weight"])
    word = np.zeros_like(params["embedding"]["word"])
    width = word.shape[1]
    word[:tokens, :tokens] = 1e3 * np.eye(tokens)
    weight = np.zeros_like(params["output"]["weight"])
    weight[:vocab, :tokens] = logits_of_token.T / np.sqrt(width)
    params["embedding"]["word"], params["output"]["weight"] = word, weight
    return jax.tree.map(jax.device_put, params, program.state_shardings["params"])


@pytest.mark.parametrize(("reduction", "loss"), [("token", 1.75), ("microbatch", 2.5)])
def test_one_token_of_loss_4_and_three_of_loss_1(reduction: str, loss: float) -> None:
    config = make_config(
        model={"num_layers": 1, "vocab_size": 2, "make_vocab_size_divisible_by": 8},
        train={"global_batch_size": 2, "num_microbatches": 2},
        loss={"reduction": reduction},
    )
    program = Program(config, jax.devices()[:1])
    # With logits (0, z) label 0 costs ln(1 + e^z): tokens 0 and 1 cost 4 and 1.
    z = np.log(np.exp([4.0, 1.0]) - 1)
    params = lookup_params(program, np.array([[0, z[0]], [0, z[1]]]))
    mask = np.zeros((2, 16), np.float32)
    mask[0, 5] = 1
    mask[1, [2, 3, 9]] = 1
    batch = {
        "tokens": np.repeat(np.int32([[0], [1]]), 16, axis=1),
        "labels": np.zeros((2, 16), np.int32),
        "loss_mask": mask,
    }
    actual, tokens, grads = jax.jit(program.loss_and_gradients)(params, rows_of(program, batch))
    assert int(tokens) == 4
    np.testing.assert_allclose(float(actual), loss, rtol=1e-6)
    # d loss / d weight[v, direction of token t] = share of t * (p_t[v] - [v = 0]) * sqrt(h)
    shares = {"token": (1 / 4, 3 / 4), "microbatch": (1 / 2, 1 / 2)}[reduction]
    width = config.model.hidden_size
    for token, share in enumerate(shares):
        p1 = 1 - np.exp(-(4.0, 1.0)[token])
        slope = share * np.sqrt(width) * p1
        np.testing.assert_allclose(
            np.asarray(grads["output"]["weight"])[:2, token], [-slope, slope], rtol=1e-5
        )


def ragged_batch(config: Any) -> dict[str, np.ndarray]:
    """Eight rows with 1, 0, 16, 3, 0, 0, 7 and 2 valid tokens."""
    batch = make_batch(config, ragged=False)
    for row, count in enumerate((1, 0, 16, 3, 0, 0, 7, 2)):
        batch["loss_mask"][row] = np.random.default_rng(row).permutation(16) < count
    return batch


def test_microbatches_without_valid_tokens_change_nothing_in_the_token_mean() -> None:
    results = []
    for microbatches, devices in ((1, 1), (8, 1), (4, 2)):
        config = make_config(
            model={"num_layers": 1},
            parallel={"fsdp": devices, "data_sharding": "optim_grads_params"},
            train={"global_batch_size": 8, "num_microbatches": microbatches},
        )
        program = Program(config, jax.devices()[:devices])
        batch = rows_of(program, ragged_batch(config))
        results.append(jax.jit(program.loss_and_gradients)(random_params(program), batch))
        loss, tokens, grads = results[-1]
        assert int(tokens) == 1 + 16 + 3 + 7 + 2
        np.testing.assert_allclose(float(loss), float(results[0][0]), rtol=1e-6)
        reference = jax.tree.map(np.asarray, results[0][2])
        assert_close_leaves(jax.tree.map(np.asarray, grads), reference, 2e-5, "gradient")


def empty_batch(program: Program) -> dict[str, jax.Array]:
    batch = make_batch(program.config, ragged=False)
    batch["loss_mask"][:] = 0
    return rows_of(program, batch)


@pytest.mark.parametrize("reduction", ["token", "microbatch"])
def test_a_batch_without_valid_tokens_has_loss_and_gradients_of_zero(reduction: str) -> None:
    config = make_config(
        model={"num_layers": 1},
        train={"global_batch_size": 4, "num_microbatches": 2},
        loss={"reduction": reduction, "z_loss_coeff": 0.01},
    )
    program = Program(config, jax.devices()[:1])
    loss, tokens, grads = jax.jit(program.loss_and_gradients)(
        random_params(program), empty_batch(program)
    )
    assert float(loss) == 0 and int(tokens) == 0
    for leaf in jax.tree.leaves(grads):
        assert np.all(np.asarray(leaf) == 0)


def test_a_batch_without_valid_tokens_is_skipped() -> None:
    config = make_config(
        model={"num_layers": 1},
        parallel={"fsdp": 2, "tensor": 2},
        train={"global_batch_size": 8, "num_microbatches": 2},
        optimizer=ADAMW,
    )
    program = Program(config, jax.devices()[:4])
    state = random_state(program)
    # one ordinary step first, so that moments and counts are not zero
    state, metrics = program.train_step(state, rows_of(program, make_batch(config)))
    assert int(metrics["skipped"]) == 0
    before = jax.tree.map(np.array, state)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(before["opt_state"]))

    state, metrics = program.train_step(state, empty_batch(program))
    assert {k: float(metrics[k]) for k in ("loss", "grad_norm", "tokens", "skipped")} == {
        "loss": 0,
        "grad_norm": 0,
        "tokens": 0,
        "skipped": 1,
    }
    after = jax.tree.map(np.asarray, state)
    assert (int(after["step"]), int(after["updates"])) == (2, 1)
    for part in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, after[part], before[part])
    assert_replicas_equal(state)


def test_evaluating_a_batch_without_valid_tokens_counts_none() -> None:
    config = make_config(model={"num_layers": 1}, train={"global_batch_size": 2})
    program = Program(config, jax.devices()[:1])
    loss, tokens = program.eval_step(random_params(program), empty_batch(program))
    assert (float(loss), int(tokens)) == (0, 0)
