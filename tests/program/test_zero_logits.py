"""A model whose logits are all zero has the loss ln(vocab_size), however the vocabulary is split.

Padding rows of the vocabulary would make it ln(padded size).
"""

from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.forward import random_params

# 100 words in 128 rows: at tensor 8 one member holds words and padding, one padding alone
MODEL = {"num_layers": 1, "make_vocab_size_divisible_by": 128}


def zero_output_state(program: Program) -> Any:
    params = random_params(program)
    return {**params, "output": jax.tree.map(lambda a: a * 0, params["output"])}


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_zero_logits_give_ln_vocab_size(tensor: int) -> None:
    config = make_config(model=MODEL, parallel={"tensor": tensor}, train={"global_batch_size": 4})
    program = Program(config, jax.devices()[:tensor])
    batch = make_batch(config)
    loss, tokens = program.eval_step(zero_output_state(program), rows_of(program, batch))
    assert int(tokens) == int(batch["loss_mask"].sum())
    np.testing.assert_allclose(float(loss) / int(tokens), np.log(100), rtol=1e-6)


def test_training_loss_is_ln_vocab_size_and_padding_rows_get_no_gradient() -> None:
    config = make_config(model=MODEL, parallel={"tensor": 8}, train={"global_batch_size": 4})
    program = Program(config)
    batch = make_batch(config)
    loss, _, grads = jax.jit(program.loss_and_gradients)(
        zero_output_state(program), rows_of(program, batch)
    )
    np.testing.assert_allclose(float(loss), np.log(100), rtol=1e-6)
    gradient = np.asarray(grads["output"]["weight"])
    assert not gradient[100:].any()
    # p - onehot sums to 0 over the vocabulary
    np.testing.assert_allclose(gradient.sum(0), 0, atol=1e-6)
    assert np.abs(gradient[:100]).max() > 1e-4
