"""The objective of multi-token prediction: what the depths add to that of a microbatch."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxtron.layers.inputs import LayerInputs
from jaxtron.layers.multi_token import tokens_ahead
from jaxtron.layers.outputs import LayerOutput
from jaxtron.layers.remat import Remat
from jaxtron.models.config import ModelConfig
from jaxtron.models.model import Fetch, Model, Params
from jaxtron.parallel.context.attention import ContextAttention


@runtime_checkable
class PredictsAhead(Model, Protocol):
    """A model with depths of multi-token prediction, numbered from 0."""

    def predict_ahead(
        self,
        params: Params,
        fetch: Fetch,
        depth: int,
        x: jax.Array,
        word: jax.Array,
        inputs: LayerInputs,
        remat: Remat,
    ) -> LayerOutput:
        """Normalised hidden states of a depth, in the residual stream's form.

        Args:
            params: as in :class:`jaxtron.models.model.Model`.
            fetch: likewise.
            depth: its number.
            x: normalised output of the depth before, or of the model.
            word: summed word embeddings of the tokens ahead ``[b, s/tensor, h]``.
            inputs: what layers see besides.
            remat: what the backward pass computes again.
        """
        ...


def ahead_of(
    batch: dict[str, jax.Array], context: ContextAttention, depths: int
) -> list[dict[str, jax.Array]]:
    """What every depth reads and predicts, for this device's tokens of a step's microbatches.

    A sequence split over ``context`` is gathered: the tokens ahead may be on another device.

    Args:
        batch: local arrays ``[microbatch, row, seq/context]``.
        context: the cut of a sequence.
        depths: ``model.mtp_num_layers``.
    """
    names = {"tokens", "labels", "loss_mask", "segment_ids"}
    whole = {name: context.whole_rows(a) for name, a in batch.items() if name in names}
    positions = context.own_positions(whole["tokens"].shape[-1])
    return [tokens_ahead(whole, positions, depth + 1) for depth in range(depths)]


def ahead_objective(
    model: PredictsAhead,
    config: ModelConfig,
    copies: Params,
    fetch: Fetch,
    x: jax.Array,
    ahead: list[dict[str, jax.Array]],
    inputs: LayerInputs,
    remat: Remat,
    loss: Callable[[jax.Array, dict[str, jax.Array]], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, Any]:
    """This device's piece of what the depths add to the objective, and their reports.

    All pipeline stages compute the depths alike, each with its part of the vocabulary.

    Args:
        model: the model.
        config: of the model.
        copies: its parts other than ``layers``.
        fetch: gathers a part.
        x: final hidden states of the model ``[b, s, h]``.
        ahead: per depth its ``tokens``, ``labels`` and ``token_weights`` ``[b, s]``.
        inputs: what layers see besides.
        remat: what the backward pass computes again.
        loss: ``(hidden states [b, s, h], entry of ahead) -> (objective, plain loss)``, pieces.

    Returns:
        the piece, and per depth ``loss`` and what the layer reports: pieces, too.
    """
    region = inputs.region
    factor = config.mtp_loss_scaling_factor / len(ahead)
    total = jnp.zeros((), jnp.float32)
    reports = []
    stream = region.own_sequence(x, axis=1)
    for depth, entry in enumerate(ahead):
        word = region.sum(model.lookup(copies, fetch, entry["tokens"], inputs), ("pipeline",))
        out = model.predict_ahead(copies, fetch, depth, stream, word, inputs, remat)
        stream = out.x
        objective, plain = loss(region.gather_sequence(stream), entry)
        total += factor * objective + out.piece / region.sizes["pipeline"]
        first = region.index("pipeline") == 0
        report = jax.tree.map(lambda a, first=first: jnp.where(first, a, 0), out.report)
        reports.append({"loss": plain, "layer": report})
    return total, reports
