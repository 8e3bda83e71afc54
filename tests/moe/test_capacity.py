"""Capacity: its arithmetic, and who is dropped in a case made by hand (O22)."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.layers.moe.capacity import expert_capacity, fits


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "factor", "capacity"),
    [
        (8, 4, 2, 1.0, 4),
        (7, 4, 1, 1.25, 3),
        (4, 2, 1, 3.0, 4),
        (4096, 128, 8, 1.25, 320),
        (8, 4, 2, 1e308, 8),
    ],
)
def test_capacity_is_rounded_up_and_at_most_all_tokens(
    tokens: int, experts: int, topk: int, factor: float, capacity: int
) -> None:
    assert expert_capacity(tokens, topk, experts, factor) == capacity


# six tokens, all but the fifth ask for expert 0; the third asks for nothing (padding)
EXPERTS = np.array([[[0], [0], [2], [0], [1], [0]]])
WEIGHTS = np.array([[[0.2], [0.9], [1.0], [0.5], [0.1], [0.9]]], np.float32)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        # the highest weights of expert 0 are tokens 1 and 5
        ("probs", [False, True, False, False, True, True]),
        # the earliest are tokens 0 and 1
        ("position", [True, True, False, False, True, False]),
    ],
)
def test_who_is_dropped(policy, kept: list[bool]) -> None:
    fit = fits(jnp.asarray(EXPERTS), jnp.asarray(WEIGHTS), 2, 2, policy)
    assert np.asarray(fit)[0, :, 0].tolist() == kept


def test_of_equal_weights_the_earlier_token_stays() -> None:
    fit = fits(jnp.zeros((1, 4, 1), jnp.int32), jnp.full((1, 4, 1), 0.5), 2, 2, "probs")
    assert np.asarray(fit)[0, :, 0].tolist() == [True, True, False, False]


def test_rows_have_their_own_capacity() -> None:
    fit = fits(jnp.zeros((3, 4, 1), jnp.int32), jnp.full((3, 4, 1), 0.5), 1, 2, "position")
    assert np.asarray(fit).sum(axis=(1, 2)).tolist() == [1, 1, 1]
