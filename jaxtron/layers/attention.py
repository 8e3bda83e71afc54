"""Self-attention with grouped key/value heads (MHA, GQA, MQA)."""

import jax
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.layers.inputs import LayerInputs, LayerNumber
from jaxtron.layers.linear import linear_of_parts
from jaxtron.layers.norm import Norm
from jaxtron.layers.parameter import Product, normal, zeros
from jaxtron.layers.rope import apply_rotary
from jaxtron.models.config import ModelConfig


class Attention(nnx.Module):
    """Multi-head attention (Vaswani et al. 2017) with query groups (Ainslie et al. 2023).

    Heads are split over ``tensor``; each device computes the query heads it holds with their
    key/value heads.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, output_std: float) -> None:
        self.config = config
        embed, heads = config.hidden_size, config.num_attention_heads
        groups, channels, std = config.query_groups, config.head_dim, config.init_method_std
        self.query = normal(
            rngs,
            (embed, heads, channels),
            ("embed", "heads", "head_dim"),
            std,
            product=Product("qkv"),
        )
        self.key_value = normal(
            rngs,
            (embed, 2, groups, channels),
            ("embed", None, "kv_heads", "head_dim"),
            std,
            product=Product("qkv"),
        )
        self.output = normal(
            rngs,
            (heads, channels, embed),
            ("heads", "head_dim", "embed"),
            output_std,
            product=Product("output", inputs=2),
        )
        if config.add_bias_linear or config.add_qkv_bias:
            self.query_bias = zeros((heads, channels), ("heads", "head_dim"))
            self.key_value_bias = zeros((2, groups, channels), (None, "kv_heads", "head_dim"))
        if config.add_bias_linear:
            self.output_bias = zeros((embed,), ("embed",))
        if config.qk_layernorm:
            self.query_norm = Norm(config, channels, "head_dim")
            self.key_norm = Norm(config, channels, "head_dim")

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array, inputs: LayerInputs, layer: LayerNumber) -> jax.Array:
        """Map the normalised stream ``x [b, s/tensor, h]`` to the update of the stream.

        ``layer`` is the layer's number in the whole model.
        """
        region, groups = inputs.region, self.config.query_groups
        query_w = self.query.get_value()
        heads = query_w.shape[1]
        split = heads < self.config.num_attention_heads

        def own_groups(w: jax.Array, axis: int) -> jax.Array:
            return region.own_groups(w, groups, axis) if split else w

        weights = [query_w, self.key_value.get_value()]
        used = [None, (own_groups, 1)]
        made = linear_of_parts(region.gather_parts(x), weights, own=used, arrives="input")
        q, key_value = (region.join(parts) for parts in zip(*made, strict=True))
        k, v = (t.squeeze(2) for t in lax.split(key_value, (1, 1), axis=2))
        if self.config.add_bias_linear or self.config.add_qkv_bias:
            bias = own_groups(self.key_value_bias[...], axis=1).astype(x.dtype)
            q = q + self.query_bias[...].astype(x.dtype)
            k, v = k + bias[0], v + bias[1]
        if self.config.qk_layernorm:
            # the norms' backward passes read what they were given
            q, k = (checkpoint_name(t, "qkv") for t in (q, k))
            q, k = self.query_norm(q), self.key_norm(k)
        if inputs.rotary is not None:
            q, k = apply_rotary(q, *inputs.rotary), apply_rotary(k, *inputs.rotary)
        q, k, v = (checkpoint_name(t, "qkv") for t in (q, k, v))
        drop = inputs.randomness.attention(heads, layer) if inputs.randomness else None
        with jax.named_scope("core"):
            core = inputs.attend(q, k, v, drop)
        output = [self.output.get_value()]
        made = linear_of_parts(region.cut(core), output, inputs=2, arrives="gradient")
        y = region.reduce_parts([y for (y,) in made], partial=split)
        if self.config.add_bias_linear:
            y = y + self.output_bias[...].astype(y.dtype)
        return y
