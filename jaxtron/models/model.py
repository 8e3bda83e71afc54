"""What a model is to the rest of jaxtron.

:class:`~jaxtron.program.Program` builds the decoder that the configuration describes, or takes any
object with this interface (``docs/extending.md``).
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from jaxtron.layers.inputs import Attend, Randomness
from jaxtron.layers.remat import Remat
from jaxtron.parallel.region import Region

Params = dict[str, Any]
Fetch = Callable[[str, Params], Params]
"""``(part, weights) -> weights`` as layers use them."""


class Model(Protocol):
    """A language model as pure functions over a nested dict of parameters.

    The dict's first level are the model's *parts*. One of them is ``layers``: its leaves hold all
    layers in their first dimension, whose logical name is ``layers``. A part is what is gathered
    together under ``parallel.data_sharding: optim_grads_params``.

    Attributes:
        shapes: ``jax.ShapeDtypeStruct`` per parameter, global and independent of the mesh.
        logical: the same tree with the names of each parameter's dimensions
            (:data:`jaxtron.mesh.rules.DEFAULT_RULES`); they decide how it is split.
    """

    shapes: Params
    logical: Params

    def init(self, key: jax.Array) -> Params:
        """Initial parameters, fp32; a function of ``key`` alone. Traced under plain ``jit``."""
        ...

    def hidden(
        self,
        params: Params,
        fetch: Fetch,
        tokens: jax.Array,
        positions: jax.Array,
        region: Region,
        attend: Attend,
        *,
        randomness: Randomness | None,
        remat: Remat,
    ) -> jax.Array:
        """Final hidden states ``[b, s, h]``, the same on all members of ``tensor``.

        Runs inside the manual region, on this device's rows and shards. A layer sums over devices
        only with the verbs of ``region``, and never reduces gradients.

        Args:
            params: parts as copied for compute; ``layers`` is a list of one dict a layer (the loop
                is unrolled) or one dict of stacked leaves (the loop is a scan).
            fetch: applied to a part (for ``layers``: to one layer's weights) just before its use;
                gathers under ``optim_grads_params``.
            tokens: ids ``[b, s]``.
            positions: ``[s]`` or ``[b, s]``.
            region: the manual region.
            attend: the attention kernel with its mask, see
                :class:`jaxtron.layers.inputs.LayerInputs`.
            randomness: dropout of this step; None when nothing is dropped.
            remat: what the backward pass computes again (``jaxtron/layers/layer_loop.py``).
        """
        ...

    def output_weight(self, params: Params, fetch: Fetch) -> jax.Array:
        """Weight of the output layer ``[vocab/tensor, h]``, vocabulary first."""
        ...
