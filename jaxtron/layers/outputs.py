"""What a layer gives back."""

from typing import Any, NamedTuple

import jax


class LayerOutput(NamedTuple):
    """Result of one layer, or of several in a row.

    Attributes:
        x: the residual stream ``[b, s/tensor, h]``.
        piece: this device's piece of an auxiliary loss; it is added to the objective.
        report: arrays to report, without derivative: of one layer as they are, of several stacked
            in their first dimension. They are summed over the microbatches of a step.
    """

    x: jax.Array
    piece: jax.Array | float = 0.0
    report: Any = ()
