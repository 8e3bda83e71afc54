"""Delayed scaling: scales of a step from the largest magnitudes of the steps before it.

A tensor is cast with a scale that is known in advance, and its own largest magnitude is measured in
passing for later steps (Micikevicius et al. 2022, arXiv:2209.05433; the default recipe of
Megatron-LM and Transformer Engine). The state is replaced every step, never optimised: per layer,
product and operand (input, gradient of the output) a history of largest magnitudes, newest first,
and the scale.

What was measured is the maximum over a step's microbatches and over all devices, so the state and
what is computed with it depend neither on the mesh nor on the cut into microbatches. Weights need
no history: they are quantised once a step, from their present values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxtron.precision.quantise import scale_of

State = dict[str, dict[str, jax.Array]]
Scales = dict[str, jax.Array]


@dataclass(frozen=True)
class DelayedScaling:
    """How the scales of a run move.

    The state is ``{"layers": {"amax_history": [layers, products, 2, length], "scale": [layers,
    products, 2]}}``, fp32; of each pair the first is the product's input and the second the
    gradient of its output. Products that are not computed in FP8 keep their first values, so that
    ``precision.fp8_exceptions`` may change between two launches of a run.

    Attributes:
        products: names of the model's products, in the order of the state.
        num_layers: layers of the model.
        history_length: steps whose largest magnitudes are kept.
        algorithm: take the largest of the history, or its newest entry.
        formats: of inputs and of gradients.
        tokens: in a step; gradients of the mean loss over them start with the scale 1 / tokens.
    """

    products: tuple[str, ...]
    num_layers: int
    history_length: int
    algorithm: Literal["max", "most_recent"]
    formats: tuple[Any, Any]
    tokens: int

    def init(self) -> State:
        """The state before the first step, nothing measured.

        Inputs have scale 1. A token's share in the gradient of the mean loss is of the order of one
        part in ``tokens``, and so is the scale of gradients.
        """
        pairs = (self.num_layers, len(self.products), 2)
        largest = jnp.array([float(jnp.finfo(f).max) for f in self.formats])
        first = self._scale_of(largest * jnp.array([1.0, 1.0 / self.tokens]))
        return {
            "layers": {
                "amax_history": jnp.zeros((*pairs, self.history_length), jnp.float32),
                "scale": jnp.broadcast_to(first, pairs),
            }
        }

    def scales(self, state: State) -> Scales:
        """Per product its scales ``[layers, 2]`` in the step that begins with ``state``."""
        scale = state["layers"]["scale"]
        return {name: scale[:, i] for i, name in enumerate(self.products)}

    def update(self, state: State, measured: Mapping[str, jax.Array]) -> State:
        """The state after a step.

        An infinity or NaN is entered as 0, so that one bad step does not spoil those after it.
        Where the history holds nothing above 0, the scale stays.

        Args:
            state: of the step.
            measured: per product ``[layers, 2]`` largest magnitudes; nothing of a product that was
                not computed in FP8.
        """
        history, scale = state["layers"]["amax_history"], state["layers"]["scale"]
        none = jnp.zeros((scale.shape[0], 2), jnp.float32)
        newest = jnp.stack([measured.get(name, none) for name in self.products], axis=1)
        newest = jnp.where(jnp.isfinite(newest), newest, 0.0)
        history = jnp.concatenate([newest[..., None], history[..., :-1]], axis=-1)
        amax = jnp.max(history, axis=-1) if self.algorithm == "max" else newest
        scale = jnp.where(amax > 0, self._scale_of(amax), scale)
        return {"layers": {"amax_history": history, "scale": scale}}

    def _scale_of(self, amax: jax.Array) -> jax.Array:
        """Scales for largest magnitudes ``[..., 2]``."""
        pairs = [scale_of(amax[..., i], fmt) for i, fmt in enumerate(self.formats)]
        return jnp.stack(pairs, axis=-1)
