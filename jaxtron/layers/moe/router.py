"""The router: which experts a token goes to, with which weights, and what balances them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtron.layers.dropout import dropout_key, fold_in, random_words
from jaxtron.layers.inputs import LayerInputs, LayerNumber, MoEInputs
from jaxtron.layers.moe.capacity import expert_capacity, fits
from jaxtron.layers.moe.losses import balancing_loss, count_choices, z_loss
from jaxtron.layers.moe.scores import choose_experts, expert_scores
from jaxtron.layers.moe.sinkhorn import sinkhorn
from jaxtron.layers.moe.tokens import Tokens
from jaxtron.layers.parameter import normal, zeros
from jaxtron.mesh.axes import BATCH_AXES
from jaxtron.models.config import ModelConfig

BALANCING_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Values of ``model.moe_router_load_balancing_type`` that have a loss."""


@dataclass(frozen=True)
class Routing:
    """Decisions for this device's tokens.

    Attributes:
        experts: int32 ``[b, t, topk]``; ``num_experts`` for a choice that was dropped or of a token
            that is not live.
        weights: fp32 ``[b, t, topk]``, 0 for those.
        counts: int32 ``[experts]``, choices of live tokens, dropped ones included.
        piece: this device's piece of the auxiliary losses, fp32 scalar.
    """

    experts: jax.Array
    weights: jax.Array
    counts: jax.Array
    piece: jax.Array


class Router(nnx.Module):
    """Linear scores of the experts in fp32, whatever the compute dtype.

    ``expert_bias`` is a buffer: part of the state, but updated from loads and not by gradients
    (``expert_bias.py``).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        assert config.num_experts is not None
        self.weight = normal(
            rngs,
            (config.num_experts, config.hidden_size),
            ("router", "embed"),
            config.init_method_std,
        )
        if config.moe_router_enable_expert_bias:
            self.expert_bias = zeros((config.num_experts,), ("router",))

    def __call__(
        self, x: jax.Array, tokens: Tokens, inputs: LayerInputs, layer: LayerNumber
    ) -> Routing:
        """Route ``x [b, t, h]``, this device's tokens of a microbatch."""
        config = self.config
        moe = inputs.moe
        assert moe is not None and config.num_experts is not None
        token_weights = tokens.own(moe.token_weights)
        live = token_weights > 0
        positions = tokens.own(moe.positions[None])[0]
        routed = self._jitter(x, positions, inputs, layer)
        logits = jnp.einsum(
            "bth,eh->bte",
            routed.astype(jnp.float32),
            self.weight[...].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        experts, weights = self._choose(logits, live, positions, tokens, moe.training)
        counts = jnp.sum(count_choices(experts, live, config.num_experts), axis=0)
        experts = jnp.where(live[..., None], experts, config.num_experts)
        experts = self._drop(experts, weights, tokens, moe)
        return Routing(
            experts=experts,
            weights=jnp.where(experts < config.num_experts, weights, 0),
            counts=counts,
            piece=self._losses(logits, live, token_weights, tokens, moe),
        )

    def _jitter(
        self, x: jax.Array, positions: jax.Array, inputs: LayerInputs, layer: LayerNumber
    ) -> jax.Array:
        """Multiply by uniform noise in 1 ± eps, in training (Switch Transformer, section 2.4)."""
        epsilon, randomness = self.config.moe_input_jitter_eps, inputs.randomness
        if epsilon is None or randomness is None:
            return x
        key = dropout_key(randomness.seed, randomness.step, layer, "router_jitter")
        words = random_words(
            fold_in(key, randomness.rows[:, None, None]),
            positions[None, :, None],
            jnp.arange(x.shape[-1], dtype=jnp.int32),
        )
        uniform = words.astype(jnp.float32) * 2.0**-32
        noise = 1 - epsilon + 2 * epsilon * uniform
        return (x.astype(jnp.float32) * noise).astype(x.dtype)

    def _choose(
        self,
        logits: jax.Array,
        live: jax.Array,
        positions: jax.Array,
        tokens: Tokens,
        training: bool,
    ) -> tuple[jax.Array, jax.Array]:
        config = self.config
        num_experts, topk = logits.shape[-1], config.moe_router_topk
        if config.moe_router_force_load_balancing:
            turn = positions[:, None] * topk + jnp.arange(topk, dtype=jnp.int32)
            experts = jnp.broadcast_to(turn % num_experts, (*logits.shape[:2], topk))
            _, weights = choose_experts(logits, self._bias(), config)
            return experts, weights
        if config.moe_router_load_balancing_type == "sinkhorn":
            plan = logits  # of which a token's choice does not depend on the tokens after it
            if training:
                plan = sinkhorn(logits, live, tokens.region, tokens.row_axes)
            experts = lax.top_k(plan, topk)[1].astype(jnp.int32)
            if topk == 1:
                scores = jax.nn.sigmoid(logits)
            else:
                scores = jax.nn.softmax(logits, axis=-1)
            return experts, jnp.take_along_axis(scores, experts, axis=-1)
        return choose_experts(logits, self._bias(), config)

    def _bias(self) -> jax.Array | None:
        return self.expert_bias[...] if self.config.moe_router_enable_expert_bias else None

    def _drop(
        self, experts: jax.Array, weights: jax.Array, tokens: Tokens, moe: MoEInputs
    ) -> jax.Array:
        """Take out choices over capacity, decided for whole sequences on every mesh."""
        config = self.config
        if config.moe_expert_capacity_factor is None:
            return experts
        assert config.num_experts is not None
        axes = tokens.region.live(tokens.row_axes)
        order = None
        asked, wanted, where = experts, lax.stop_gradient(weights), tokens.own(moe.positions[None])
        if axes:
            asked, wanted, where = (
                lax.all_gather(a, axes, axis=1, tiled=True) for a in (asked, wanted, where)
            )
            order = jnp.argsort(where[0])
            asked, wanted = asked[:, order], wanted[:, order]
        capacity = expert_capacity(
            asked.shape[1],
            config.moe_router_topk,
            config.num_experts,
            config.moe_expert_capacity_factor,
        )
        fit = fits(asked, wanted, capacity, config.num_experts, config.moe_token_drop_policy)
        if order is not None:
            mine = jnp.searchsorted(where[0][order], tokens.own(moe.positions[None])[0])
            fit = fit[:, mine]
        return jnp.where(fit, experts, config.num_experts)

    def _losses(
        self,
        logits: jax.Array,
        live: jax.Array,
        token_weights: jax.Array,
        tokens: Tokens,
        moe: MoEInputs,
    ) -> jax.Array:
        config = self.config
        piece = jnp.zeros((), jnp.float32)
        kind = config.moe_router_load_balancing_type
        if config.moe_aux_loss_coeff and kind in BALANCING_LOSSES:
            scores = expert_scores(logits, config)
            # the choice by scores alone: neither groups nor the bias enter the loss
            chosen = lax.top_k(lax.stop_gradient(logits), config.moe_router_topk)[1]
            earlier: jax.Array | int = 0
            if kind == "global_aux_loss" and moe.earlier is not None:
                everyone = (*BATCH_AXES, "context", "tensor")
                earlier = tokens.region.sum(moe.earlier, everyone)
            piece += config.moe_aux_loss_coeff * balancing_loss(
                scores,
                count_choices(chosen.astype(jnp.int32), live, logits.shape[-1]),
                token_weights,
                topk=config.moe_router_topk,
                region=tokens.region,
                axes=tokens.row_axes if kind == "seq_aux_loss" else tokens.microbatch_axes,
                over_rows=kind != "seq_aux_loss",
                earlier=earlier,
            )
        if config.moe_z_loss_coeff:
            piece += config.moe_z_loss_coeff * z_loss(logits, token_weights)
        return piece / tokens.copies
