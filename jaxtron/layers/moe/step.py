"""What a training step adds to a model with experts: weights of its tokens, and what it reports."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from jaxtron.layers.moe.expert_bias import BUFFER, update_bias
from jaxtron.models.config import ModelConfig
from jaxtron.models.layer_pattern import layer_name
from jaxtron.parallel.region import Region

LOAD_BINS = (0.5, 0.8, 1.25, 2.0)
"""Between these loads, relative to the mean of a layer, its experts are counted."""


def live_tokens(loss_mask: jax.Array, positions: jax.Array, region: Region) -> jax.Array:
    """Tokens that a router works for, fp32 ``[..., s]``: 1 where a valid label follows, else 0.

    What stands behind the last valid label of a row, like a row without any, cannot change the
    loss: it is padding. A prompt that is masked in the loss, but answered, is not.

    Args:
        loss_mask: ``[..., s]``.
        positions: ``[s]`` positions in the row.
        region: the manual region.
    """
    last = jnp.max(jnp.where(loss_mask > 0, positions, -1), axis=-1, keepdims=True)
    return (positions <= region.max(last, ("context",))).astype(jnp.float32)


def rows_of_layers(model: ModelConfig, order: Sequence[int]) -> dict[int, int]:
    """Number of each layer with experts, and its row in the reports, one layer's after the other's.

    Args:
        model: the architecture.
        order: the stack's blocks as they are placed; -1: none.
    """
    kinds = model.layer_block
    experts = [i for i, kind in enumerate(kinds) if kind]
    return {
        model.num_dense_layers + block * len(kinds) + i: place * len(experts) + nth
        for place, block in enumerate(order)
        if block >= 0
        for nth, i in enumerate(experts)
    }


def loads_by_name(load: jax.Array, model: ModelConfig) -> Any:
    """The stack's loads ``[blocks, experts]``, of blocks of several layers by a layer's name.

    ``load`` is then ``[blocks, layers with experts, experts]``.
    """
    if len(model.layer_block) == 1:
        return load
    places = [i for i, kind in enumerate(model.layer_block) if kind]
    return {layer_name(i): load[:, nth] for nth, i in enumerate(places)}


def updated_buffers(buffers: Any, load: Any, config: ModelConfig) -> Any:
    """The buffers after a step in which experts had the ``load [layers, experts]``.

    Layers that stand side by side in ``buffers`` have a dict of loads, by their names.
    """
    return {
        name: update_bias(value, load, config.moe_router_bias_update_rate)
        if name == BUFFER
        else updated_buffers(value, load[name] if isinstance(load, dict) else load, config)
        for name, value in buffers.items()
    }


def load_metrics(
    load: jax.Array, losses: jax.Array, layers: Sequence[str], *, per_layer: bool
) -> dict[str, jax.Array]:
    """Scalars about the experts' load and the router's losses.

    ``moe_load_max`` and ``moe_load_min`` are loads of the fullest and the emptiest expert relative
    to the mean of their layer, over all layers; ``moe_idle_experts`` counts experts without a
    token, and ``moe_aux_loss`` is what routers added to the objective. With ``per_layer`` fullest
    and emptiest also of each layer (``moe_load_max/layer_0``), and how many of its experts have a
    load between two of :data:`LOAD_BINS` (``moe_load_0.8_to_1.25/layer_0``; the lower one counts
    in).

    Args:
        load: int32 ``[layers, experts]``.
        losses: fp32, in pieces that are added.
        layers: name of each layer with experts: ``layer_0``, and ``mtp_1`` of a depth of
            multi-token prediction.
        per_layer: ``model.moe_per_layer_logging``.
    """
    relative = load / jnp.maximum(jnp.mean(load, axis=1, keepdims=True), 1e-9)
    most, least = jnp.max(relative, axis=1), jnp.min(relative, axis=1)
    metrics = {
        "moe_aux_loss": jnp.sum(losses),
        "moe_load_max": jnp.max(most),
        "moe_load_min": jnp.min(least),
        "moe_idle_experts": jnp.sum(load == 0),
    }
    if per_layer:
        for i, layer in enumerate(layers):
            metrics[f"moe_load_max/{layer}"] = most[i]
            metrics[f"moe_load_min/{layer}"] = least[i]
            for name, experts in _histogram(relative[i]).items():
                metrics[f"{name}/{layer}"] = experts
    return metrics


def _histogram(relative: jax.Array) -> dict[str, jax.Array]:
    """Experts by their load, int32 each."""
    names = [
        f"under_{LOAD_BINS[0]:g}",
        *(f"{low:g}_to_{high:g}" for low, high in pairwise(LOAD_BINS)),
        f"over_{LOAD_BINS[-1]:g}",
    ]
    which = jnp.searchsorted(jnp.array(LOAD_BINS), relative, side="right")
    return {
        f"moe_load_{name}": jnp.sum(which == i, dtype=jnp.int32) for i, name in enumerate(names)
    }
