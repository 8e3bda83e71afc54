"""A switch that is set acts in the compiled model, and nothing sees the future."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config
from tests.program.forward import logits, random_params

LAYERS = 2


def outputs(
    batch: dict[str, np.ndarray], changed: int | None = None, tensor: int = 1, **model: Any
) -> np.ndarray:
    """Logits of one row ``[seq, vocab]``, with the token at ``changed`` replaced."""
    config = make_config(
        model={"num_layers": LAYERS, **model},
        parallel={"tensor": tensor},
        train={"global_batch_size": 1},
    )
    program = Program(config, jax.devices()[:tensor])
    if changed is not None:
        tokens = batch["tokens"].copy()
        tokens[0, changed] = (tokens[0, changed] + 1) % 100
        batch = {**batch, "tokens": tokens}
    return logits(program, random_params(program), batch)[0]


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    return make_batch(make_config(train={"global_batch_size": 1}), ragged=False)


@pytest.fixture(scope="module")
def plain(batch: dict[str, np.ndarray]) -> np.ndarray:
    return outputs(batch)


@pytest.mark.parametrize("tensor", [1, 4])
def test_the_first_token_reaches_the_last_and_no_token_sees_the_future(
    batch: dict[str, np.ndarray], tensor: int
) -> None:
    plain = outputs(batch, tensor=tensor)
    assert np.abs(outputs(batch, 0, tensor)[-1] - plain[-1]).max() > 1e-4
    later = outputs(batch, 9, tensor)
    np.testing.assert_array_equal(later[:9], plain[:9])
    assert np.all(np.abs(later[9:] - plain[9:]).max(-1) > 0)


def test_sliding_window_ends_the_influence_of_far_tokens_exactly(
    batch: dict[str, np.ndarray],
) -> None:
    window = 4
    plain, changed = (outputs(batch, at, window_size=window) for at in (None, 2))
    # one layer reaches window - 1 tokens on
    last = 2 + LAYERS * (window - 1)
    moved = np.abs(changed - plain).max(-1) > 0
    np.testing.assert_array_equal(np.flatnonzero(moved), np.arange(2, last + 1))


@pytest.mark.parametrize(
    "switch",
    [
        {"rotary_base": 100.0},
        {"rotary_percent": 0.5},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"position_embedding_type": "none"},
        {"qk_layernorm": True},
        {"layernorm_epsilon": 0.1},
        {"activation": "geglu"},
        {"window_size": 3},
    ],
    ids=lambda switch: next(iter(switch)),
)
def test_switch_changes_the_logits(
    batch: dict[str, np.ndarray], plain: np.ndarray, switch: dict[str, Any]
) -> None:
    assert np.abs(outputs(batch, **switch) - plain).max() > 1e-3
