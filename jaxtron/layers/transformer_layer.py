"""The pre-norm transformer layer."""

import math

import jax
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.layers.attention import Attention
from jaxtron.layers.inputs import LayerInputs, LayerNumber
from jaxtron.layers.mla import LatentAttention
from jaxtron.layers.mlp import MLP
from jaxtron.layers.moe.layer import MoE
from jaxtron.layers.norm import Norm
from jaxtron.layers.outputs import LayerOutput
from jaxtron.models.config import ModelConfig


class TransformerLayer(nnx.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``, or a mixture of experts for the MLP.

    Both sums are in the dtype of the stream.

    Output projections start at ``init_method_std / sqrt(2 num_layers)``, as in GPT-2 and Megatron.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, dense: bool = False) -> None:
        """Build the layer; ``dense`` gives it an MLP in a model whose other layers have experts."""
        output_std = config.init_method_std / math.sqrt(2 * config.num_layers)
        self.attention_norm = Norm(config, config.hidden_size)
        attention = LatentAttention if config.multi_latent_attention else Attention
        self.attention = attention(config, rngs, output_std)
        self.mlp_norm = Norm(config, config.hidden_size)
        self.has_experts = config.num_experts is not None and not dense
        if self.has_experts:
            self.moe = MoE(config, rngs, output_std)
        else:
            self.mlp = MLP(config, rngs, output_std)

    def __call__(self, x: jax.Array, inputs: LayerInputs, layer: LayerNumber) -> LayerOutput:
        """Advance the residual stream ``x [b, s/tensor, h]`` by layer number ``layer``."""
        y = checkpoint_name(self.attention_norm(x, inputs.dtype), "attention_norm")
        y = checkpoint_name(self.attention(y, inputs, layer), "attn_proj")
        with jax.named_scope("residual"):
            x = x + inputs.hidden_dropout(y, layer, "attention")
        y = checkpoint_name(self.mlp_norm(x, inputs.dtype), "mlp_norm")
        if not self.has_experts:
            y = self.mlp(y, inputs)
            with jax.named_scope("residual"):
                return LayerOutput(x + inputs.hidden_dropout(y, layer, "mlp"))
        y, piece, load = self.moe(y, inputs, layer)
        with jax.named_scope("residual"):
            x = x + inputs.hidden_dropout(y, layer, "mlp")
        return LayerOutput(x, piece, {"load": load, "loss": lax.stop_gradient(piece)})
