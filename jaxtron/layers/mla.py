"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.layers.inputs import LayerInputs, LayerNumber
from jaxtron.layers.linear import linear, linear_of_parts
from jaxtron.layers.norm import Norm
from jaxtron.layers.parameter import normal
from jaxtron.layers.rope import apply_rotary, attention_temperature
from jaxtron.models.config import ModelConfig


class LatentAttention(nnx.Module):
    """Attention whose keys and values are made from one normalised latent per token.

    A query or key has channels with content and channels with position; the latter are rotated, and
    a token's key has the same ones in all heads. Heads are split over ``tensor``; the latents are
    computed by every member, and their weights are whole.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, output_std: float) -> None:
        self.config = config
        embed, heads, std = config.hidden_size, config.num_attention_heads, config.init_method_std
        content, position = config.qk_head_dim, config.qk_pos_emb_head_dim
        value, latent, q_latent = config.v_head_dim, config.kv_lora_rank, config.q_lora_rank
        if q_latent is not None:
            self.query_down = normal(rngs, (embed, q_latent), ("embed", "latent"), std)
            self.query_norm = Norm(config, q_latent, "latent")
        self.query = normal(
            rngs,
            (q_latent or embed, heads, content + position),
            ("latent" if q_latent else "embed", "heads", "head_dim"),
            std,
        )
        self.key_value_down = normal(rngs, (embed, latent + position), ("embed", "latent"), std)
        self.key_value_norm = Norm(config, latent, "latent")
        self.key_value = normal(
            rngs, (latent, heads, content + value), ("latent", "heads", "head_dim"), std
        )
        self.output = normal(
            rngs, (heads, value, embed), ("heads", "head_dim", "embed"), output_std
        )

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array, inputs: LayerInputs, layer: LayerNumber) -> jax.Array:
        """Map the normalised stream ``x [b, s/tensor, h]`` to the update of the stream.

        ``layer`` is the layer's number in the whole model.
        """
        config, region = self.config, inputs.region
        content, position = config.qk_head_dim, config.qk_pos_emb_head_dim
        assert inputs.rotary is not None
        made = [self._project(part) for part in region.gather_parts(x)]
        q, key_value, shared = (region.join(parts) for parts in zip(*made, strict=True))
        k, v = jnp.split(key_value, [content], axis=-1)
        heads = q.shape[2]
        # the rotated channels first, as apply_rotary expects
        q_content, q_position = jnp.split(q, [content], axis=-1)
        q = apply_rotary(jnp.concatenate([q_position, q_content], axis=-1), *inputs.rotary)
        q = q * jnp.asarray(attention_temperature(config), q.dtype)
        shared = apply_rotary(shared[:, :, None], *inputs.rotary)
        shared = jnp.broadcast_to(shared, (*k.shape[:3], position))
        k = jnp.concatenate([shared, k], axis=-1)
        # kernels want values as wide as keys; the padding adds nothing
        width = content + position
        v = lax.pad(v, jnp.zeros((), v.dtype), [(0, 0, 0)] * 3 + [(0, width - v.shape[-1], 0)])
        q, k, v = (checkpoint_name(t, "qkv") for t in (q, k, v))
        drop = inputs.randomness.attention(heads, layer) if inputs.randomness else None
        with jax.named_scope("core"):
            core = inputs.attend(q, k, v, drop)[..., : config.v_head_dim]
        output = [self.output.get_value()]
        ys = linear_of_parts(region.cut(core), output, inputs=2, arrives="gradient")
        return region.reduce_parts([y for (y,) in ys], partial=heads < config.num_attention_heads)

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys with values, and the keys' channels with position, of ``x [..., h]``.

        ``[..., heads, content + position]``, ``[..., heads, content + value]`` and ``[...,
        position]``.
        """
        config, latent_q = self.config, x
        if config.q_lora_rank is not None:
            (latent_q,) = linear(x, [self.query_down.get_value()])
            latent_q = self.query_norm(checkpoint_name(latent_q, "qkv"))
        (q,) = linear(latent_q, [self.query.get_value()])
        (down,) = linear(x, [self.key_value_down.get_value()])
        latent, shared = jnp.split(checkpoint_name(down, "qkv"), [config.kv_lora_rank], axis=-1)
        (key_value,) = linear(self.key_value_norm(latent), [self.key_value.get_value()])
        return q, key_value, shared
