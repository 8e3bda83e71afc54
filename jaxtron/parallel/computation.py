"""A microbatch's way through the model, cut where a pipeline cuts it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxtron.layers.inputs import LayerNumber
from jaxtron.layers.outputs import LayerOutput

Copies = dict[str, Any]
Side = Any


@dataclass(frozen=True)
class Computation:
    """Functions whose composition is the objective of one microbatch.

    Attributes:
        side: ``microbatch -> side``: arrays that the other functions read and that need no
            derivative, the microbatch's own among them.
        lookup: ``(copies, side) -> x``, this pipeline stage's share of the word embeddings
            ``[b, s/tensor, h]``.
        embed: ``(copies, side, x) -> x``, input of the first layer from their sum.
        layers: ``(layers, side, x, first, earlier) -> output`` of consecutive layers; ``earlier``
            is the sum of these layers' reports over the step's microbatches before, or None.
        head: ``(copies, side, x) -> (piece of the objective, report)`` from the last layer's
            output; reports are summed over microbatches.
        embeds_affinely: whether ``embed`` is affine in ``x``, so that its derivative is the same
            everywhere.
        looks_back: whether layers read ``earlier``; None is then the first microbatch's.
    """

    side: Callable[[Any], Side]
    lookup: Callable[[Copies, Side], jax.Array]
    embed: Callable[[Copies, Side, jax.Array], jax.Array]
    layers: Callable[[Any, Side, jax.Array, LayerNumber, Any], LayerOutput]
    head: Callable[[Copies, Side, jax.Array], tuple[jax.Array, Any]]
    embeds_affinely: bool = True
    looks_back: bool = False

    def objective(
        self, copies: Copies, microbatch: Any, earlier: Any = None
    ) -> tuple[jax.Array, Any]:
        """All of it on one stage: ``(piece of the objective, (head's report, layers' report))``."""
        side = self.side(microbatch)
        x = self.embed(copies, side, self.lookup(copies, side))
        out = self.layers(copies["layers"], side, x, 0, earlier)
        objective, report = self.head(copies, side, out.x)
        return objective + out.piece, (report, out.report)
