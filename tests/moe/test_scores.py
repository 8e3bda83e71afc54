"""Choice of experts and their weights, by hand and in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.layers.moe.scores import choose_experts, expert_scores
from tests.moe.block import model_config

LOGITS = np.array([[2.0, 0.0, 1.0, -1.0], [0.0, 0.0, 0.0, 3.0]], np.float32)


def choose(logits: np.ndarray = LOGITS, bias=None, **changes):
    config = model_config(num_experts=logits.shape[-1], **changes)
    experts, weights = choose_experts(jnp.asarray(logits), bias, config)
    return np.asarray(experts).tolist(), np.asarray(weights)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_softmax_over_the_chosen_experts_is_the_default() -> None:
    experts, weights = choose()
    assert experts == [[0, 2], [3, 0]]  # of equal logits the lower number
    e = np.exp(1.0)
    np.testing.assert_allclose(weights[0], [e / (1 + e), 1 / (1 + e)], rtol=1e-6)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


def test_pre_softmax_keeps_the_probabilities_of_all_experts() -> None:
    experts, weights = choose(moe_router_pre_softmax=True, moe_router_topk_scaling_factor=2.5)
    assert experts == [[0, 2], [3, 0]]
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, 2.5 * np.take_along_axis(p, np.array(experts), 1), 1e-6)


def test_sigmoid_scores_are_divided_by_their_sum_unless_one_is_chosen() -> None:
    _, weights = choose(moe_router_score_function="sigmoid")
    s = sigmoid(np.array([2.0, 1.0]))
    np.testing.assert_allclose(weights[0], s / s.sum(), rtol=1e-6)
    _, weights = choose(moe_router_score_function="sigmoid", moe_router_topk=1)
    np.testing.assert_allclose(weights[:, 0], sigmoid(np.array([2.0, 3.0])), rtol=1e-6)


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    experts, weights = choose(
        bias=np.array([0, 0, 0, 0.9], np.float32),
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    assert experts[0] == [3, 0]  # sigmoid(-1) + 0.9 > sigmoid(2)
    s = sigmoid(np.array([-1.0, 2.0]))
    np.testing.assert_allclose(weights[0], s / s.sum(), rtol=1e-6)


def test_groups_are_ranked_by_the_sum_of_their_best_experts() -> None:
    # groups (0,1), (2,3), (4,5), (6,7); the single best expert is in the worst group but one
    logits = np.array([[3.0, -9.0, 2.0, 1.9, 1.0, 0.9, 0.0, 0.1]], np.float32)
    experts, _ = choose(
        logits,
        moe_router_topk=4,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_score_function="sigmoid",
    )
    # sums of two sigmoids: 0.953, 1.751, 1.442, 1.025 -> groups 1 and 2
    assert sorted(experts[0]) == [2, 3, 4, 5]


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_scores_of_the_losses_are_a_distribution(function: str) -> None:
    config = model_config(num_experts=4, moe_router_score_function=function)
    scores = np.asarray(expert_scores(jnp.asarray(LOGITS), config))
    raw = np.exp(LOGITS) if function == "softmax" else sigmoid(LOGITS)
    np.testing.assert_allclose(scores, raw / raw.sum(-1, keepdims=True), rtol=1e-6)
