"""What every layer of a model sees besides the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxtron.parallel.region import Region

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class LayerInputs:
    """Side inputs of a transformer layer.

    Attributes:
        region: the verbs of the manual region.
        attend: ``(q [b,s,n,d], k [b,s,g,d], v [b,s,g,d]) -> [b,s,n,d]``, the chosen kernel with its
            mask.
        rotary: tables ``(cos, sin)`` of the rotary embedding, or None.
    """

    region: Region
    attend: Attend
    rotary: tuple[jax.Array, jax.Array] | None
