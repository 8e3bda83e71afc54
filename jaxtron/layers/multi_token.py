"""Multi-token prediction: a layer that looks one token further ahead than the one before it.

Depth k predicts, at position i, token ``i + k + 1`` from what depth ``k - 1`` (the model itself for
k = 1) knows there and from the embedding of token ``i + k``. Embedding and output layer are the
model's. DeepSeek-V3 (arXiv:2412.19437), section 2.2; Megatron's ``MultiTokenPredictionLayer``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtron.layers.inputs import LayerInputs, LayerNumber
from jaxtron.layers.norm import Norm
from jaxtron.layers.outputs import LayerOutput
from jaxtron.layers.parameter import normal
from jaxtron.models.config import ModelConfig


class MultiTokenPrediction(nnx.Module):
    """``final_norm(layer(projection [embedding_norm(e); hidden_norm(x)]))``.

    ``projection`` is ``[2, embed, embed]``: the first matrix is the embedding's.
    """

    def __init__(
        self, config: ModelConfig, rngs: nnx.Rngs, layer_class: Callable[..., nnx.Module]
    ) -> None:
        hidden = config.hidden_size
        self.embedding_norm = Norm(config, hidden)
        self.hidden_norm = Norm(config, hidden)
        self.projection = normal(
            rngs, (2, hidden, hidden), (None, "embed", "embed"), config.init_method_std
        )
        self.layer = layer_class(config, rngs)
        self.final_norm = Norm(config, hidden)

    def __call__(
        self, x: jax.Array, embedded: jax.Array, inputs: LayerInputs, layer: LayerNumber
    ) -> LayerOutput:
        """Advance by one depth.

        Args:
            x: normalised output of the depth before ``[b, s/tensor, h]``.
            embedded: word embeddings of the tokens ahead ``[b, s/tensor, h]``.
            inputs: what layers see besides.
            layer: number of the layer: those of the model come first.

        Returns:
            normalised hidden states in the stream's form, and what the layer gives besides.
        """
        weights = self.projection[...].astype(inputs.dtype)
        ahead = jnp.einsum("bsh,hd->bsd", self.embedding_norm(embedded, inputs.dtype), weights[0])
        x = ahead + jnp.einsum("bsh,hd->bsd", self.hidden_norm(x, inputs.dtype), weights[1])
        out = self.layer(x.astype(embedded.dtype), inputs, layer)
        return out._replace(x=self.final_norm(out.x, inputs.dtype))


def tokens_ahead(
    whole: dict[str, jax.Array], positions: jax.Array, depth: int
) -> dict[str, jax.Array]:
    """What depth ``depth`` reads and predicts at ``positions``.

    Args:
        whole: arrays ``[..., s]`` of whole rows in their order: ``tokens``, ``labels``,
            ``loss_mask`` and, with documents, ``segment_ids``.
        positions: int32 ``[t]``.
        depth: tokens further than the model's own prediction.

    Returns:
        ``tokens``, ``labels`` and ``loss_mask`` ``[..., t]``, from ``depth`` places further in the
        row. Behind its end, and in another document, the mask is 0.
    """
    further = positions + depth
    ahead = {
        name: whole[name].at[..., further].get(mode="fill", fill_value=0)
        for name in ("tokens", "labels", "loss_mask")
    }
    if "segment_ids" in whole:
        there = whole["segment_ids"].at[..., further].get(mode="fill", fill_value=-1)
        same = there == whole["segment_ids"][..., positions]
        ahead["loss_mask"] = jnp.where(same, ahead["loss_mask"], 0)
    return ahead
