"""What a model is to the rest of jaxtron.

:class:`~jaxtron.program.Program` builds the decoder that the configuration describes, or takes any
object with this interface (``docs/extending.md``).
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from jaxtron.layers.inputs import LayerInputs, LayerNumber
from jaxtron.layers.outputs import LayerOutput
from jaxtron.layers.remat import Remat

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

    def tables(self, positions: jax.Array) -> Any:
        """Arrays that depend on ``positions [s]`` or ``[b, s]`` alone and that all layers read.

        They reach the layers as ``inputs.rotary``; None when there are none.
        """
        ...

    def lookup(
        self, params: Params, fetch: Fetch, tokens: jax.Array, inputs: LayerInputs
    ) -> jax.Array:
        """Word embeddings ``[b, s/tensor, h]`` of ``tokens [b, s]``, still to be summed.

        Each pipeline stage contributes the rows of the vocabulary it holds; jaxtron sums them over
        ``pipeline``.

        This method and those below run inside the manual region, on this device's rows and shards.
        They sum over devices only with the verbs of ``inputs.region``, and never reduce gradients.

        Args:
            params: the parts other than ``layers``, as copied for compute.
            fetch: applied to a part (for ``layers``: to one layer's weights) just before its use;
                gathers under ``optim_grads_params``.
            tokens: ids.
            inputs: what layers see besides the residual stream.
        """
        ...

    def embed(
        self,
        params: Params,
        fetch: Fetch,
        x: jax.Array,
        positions: jax.Array,
        inputs: LayerInputs,
    ) -> jax.Array:
        """Input of layer 0 from the summed word embeddings ``x``; affine in ``x``, except
        for a decoder's dense layers before those with experts.

        ``positions`` are ``[s]`` or ``[b, s]``.
        """
        ...

    def run_layers(
        self,
        layers: Any,
        fetch: Fetch,
        x: jax.Array,
        first: LayerNumber,
        inputs: LayerInputs,
        remat: Remat,
    ) -> LayerOutput:
        """Advance ``x`` by some consecutive layers of the model.

        A pipeline stage calls this with the layers it holds.

        Args:
            layers: a list of one dict a layer (the loop is unrolled) or one dict of stacked leaves
                (the loop is a scan), as copied for compute.
            fetch: as above.
            x: ``[b, s/tensor, h]``.
            first: number of the first of the layers in the whole model.
            inputs: what layers see besides.
            remat: what the backward pass computes again (``jaxtron/layers/layer_loop.py``).
        """
        ...

    def final(self, params: Params, fetch: Fetch, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Final hidden states ``[b, s, h]`` from the last layer's output ``x [b, s/tensor, h]``.

        The same on all members of ``tensor``.
        """
        ...

    def output_weight(self, params: Params, fetch: Fetch) -> jax.Array:
        """Weight of the output layer ``[vocab/parts, h]``, vocabulary first."""
        ...
