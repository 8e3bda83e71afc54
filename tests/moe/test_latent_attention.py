"""Multi-head latent attention against Hugging Face's DeepSeek-V2, with YaRN, in float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtron.layers.inputs import LayerInputs
from jaxtron.layers.mla import LatentAttention
from jaxtron.layers.rope import attention_temperature, rotary_tables
from jaxtron.mesh.axes import AXES
from jaxtron.models.config import ModelConfig
from jaxtron.parallel.region import Region

B, S, HIDDEN, HEADS = 2, 12, 32, 4
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def config_of(q_lora_rank: int | None) -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=32,
        num_attention_heads=HEADS,
        vocab_size=16,
        max_position_embeddings=64,
        layernorm_epsilon=1e-6,
        multi_latent_attention=True,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
        rope_scaling=YARN,
        init_method_std=0.3,
    )


def attend(q: jax.Array, k: jax.Array, v: jax.Array, _: object) -> jax.Array:
    scores = jnp.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -jnp.inf)
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores, axis=-1), v)


def test_the_temperature_is_the_published_one() -> None:
    # DeepSeek-V2: 0.1 * 0.707 * ln(40) + 1, squared
    config = config_of(None)
    expected = (0.1 * 0.707 * math.log(4.0) + 1) ** 2
    assert attention_temperature(config) == pytest.approx(expected)


@pytest.mark.parametrize("q_lora_rank", [None, 12])
def test_output_equals_hugging_face(q_lora_rank: int | None) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
        DeepseekV2Attention,
        DeepseekV2RotaryEmbedding,
    )

    config = config_of(q_lora_rank)
    module = LatentAttention(config, nnx.Rngs(params=1), 0.3)
    x = np.random.default_rng(0).normal(size=(B, S, HIDDEN)).astype(np.float32)
    region = Region(dict.fromkeys(AXES, 1), False)
    tables = rotary_tables(config, jnp.arange(S))
    ours = module(
        jnp.asarray(x), LayerInputs(region, attend, tables, None, jnp.dtype(jnp.float32)), 0
    )

    theirs_config = DeepseekV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            **{k: v for k, v in YARN.items() if k != "type"},
        },
        attn_implementation="eager",
    )
    theirs = DeepseekV2Attention(theirs_config, layer_idx=0).float()
    # Hugging Face rotates neighbouring channels, we the halves.
    halves = [0, 2, 1, 3]

    def put(linear, weight: np.ndarray) -> None:
        assert linear.weight.shape == weight.shape
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(np.array(weight)))

    def per_head(weight: jax.Array, rotated_at: int | None) -> np.ndarray:
        w = np.asarray(weight)
        if rotated_at is not None:
            w = w.copy()
            w[..., rotated_at:] = w[..., rotated_at:][..., halves]
        return w.reshape(w.shape[0], -1).T

    if q_lora_rank is None:
        put(theirs.q_proj, per_head(module.query[...], 8))
    else:
        put(theirs.q_a_proj, np.asarray(module.query_down[...]).T)
        put(theirs.q_b_proj, per_head(module.query[...], 8))
    put(theirs.kv_a_proj_with_mqa, per_head(module.key_value_down[...][:, None], 16))
    put(theirs.kv_b_proj, per_head(module.key_value[...], None))
    put(theirs.o_proj, np.asarray(module.output[...]).reshape(-1, HIDDEN).T)

    hidden = torch.from_numpy(x)
    positions = torch.arange(S)[None].expand(B, S)
    rotary = DeepseekV2RotaryEmbedding(theirs_config)(hidden, positions)
    mask = torch.full((1, 1, S, S), float("-inf")).triu(1)
    with torch.no_grad():
        expected, _ = theirs(hidden, attention_mask=mask, position_embeddings=rotary)
    np.testing.assert_allclose(np.asarray(ours), expected.numpy(), atol=2e-5)
