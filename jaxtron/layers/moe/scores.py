"""From router logits to the experts of a token and their weights; everything in fp32."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.models.config import ModelConfig

EPSILON = 1e-20  # of Megatron and DeepSeek, in the sum of sigmoid scores


def expert_scores(logits: jax.Array, config: ModelConfig) -> jax.Array:
    """Scores ``[..., experts]`` in the balancing losses: a distribution over experts.

    Softmax of the logits, or sigmoid scores divided by their sum (DeepSeek-V3, arXiv:2412.19437,
    eq. 19).
    """
    if config.moe_router_score_function == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    scores = jax.nn.sigmoid(logits)
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + EPSILON)


def choose_experts(
    logits: jax.Array, bias: jax.Array | None, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """The ``topk`` experts of every token and their weights.

    Of equal scores the expert with the lower number is taken.

    Args:
        logits: fp32 ``[..., experts]``.
        bias: fp32 ``[experts]``, added to the scores for the choice alone; or None.
        config: the router's keys.

    Returns:
        ``(experts, weights)``: int32 and fp32 ``[..., topk]``.
    """
    sigmoid = config.moe_router_score_function == "sigmoid"
    if sigmoid:
        scores = jax.nn.sigmoid(logits)
    elif config.moe_router_pre_softmax:
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = logits
    preference = lax.stop_gradient(scores)
    if bias is not None:
        preference = preference + lax.stop_gradient(bias)
    experts = _top_experts(preference, config)
    weights = _weigh(jnp.take_along_axis(scores, experts, axis=-1), config)
    return experts, weights


def _weigh(chosen: jax.Array, config: ModelConfig) -> jax.Array:
    """Weights ``[..., topk]`` from the scores of the chosen experts.

    ``chosen`` are sigmoid scores, softmax probabilities with ``moe_router_pre_softmax``, and logits
    otherwise.
    """
    if config.moe_router_score_function == "sigmoid":
        if config.moe_router_topk > 1:
            chosen = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + EPSILON)
    elif not config.moe_router_pre_softmax:
        chosen = jax.nn.softmax(chosen, axis=-1)
    return chosen * (config.moe_router_topk_scaling_factor or 1.0)


def _top_experts(preference: jax.Array, config: ModelConfig) -> jax.Array:
    """Numbers of the ``topk`` preferred experts, out of the preferred groups if there are groups.

    A group counts with the sum of its best ``topk / group_topk`` experts (DeepSeek-V3, section
    2.1.2; Megatron's ``group_limited_topk``).
    """
    topk = config.moe_router_topk
    groups, kept = config.moe_router_num_groups, config.moe_router_group_topk
    if groups is not None and kept is not None:
        grouped = preference.reshape(*preference.shape[:-1], groups, -1)
        best, _ = lax.top_k(grouped, topk // kept)
        _, chosen = lax.top_k(jnp.sum(best, axis=-1), kept)
        allowed = jnp.any(jax.nn.one_hot(chosen, groups, dtype=jnp.bool_), axis=-2)
        grouped = jnp.where(allowed[..., None], grouped, -jnp.inf)
        preference = grouped.reshape(preference.shape)
    return lax.top_k(preference, topk)[1].astype(jnp.int32)
