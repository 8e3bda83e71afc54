"""Arithmetic and parameters of a model, in closed form.

Conventions, per token and for forward plus backward (the backward costs twice the forward, a
multiply-add is two operations, hence the factor 6 per multiply-add of the forward):

* matrix products only; norms, activations, softmax, rotary embedding and embedding look-up are not
  counted, nor is anything that recomputation repeats;
* of a mixture of experts those count that a token visits, with the router and the shared expert;
  capacity, padding and dropped tokens change nothing;
* a depth of multi-token prediction counts with its projection, its layer and its output layer;
* the output layer counts with the padded vocabulary, because that is the product that runs;
* attention is counted once per query-key pair in each of its two products. The two conventions
  differ in the pairs alone:

  * **causal**, Megatron-LM's current count: a query meets half of the sequence, ``s / 2`` keys.
    With a sliding window of ``w < s`` keys it meets ``w - w**2 / (2 s)`` on average, which is the
    same continuous area (a triangle up to ``w``, then a band) and equals ``s / 2`` at ``w = s``;
  * **full attention**, the formula of Narayanan et al. 2021 (arXiv:2104.04473) that older published
    tables use: a query meets all ``s`` keys, whatever mask or window is applied.

Of packed rows (``reset_attention_mask``) the tokens of documents count, without padding, and a
query meets keys of its own document: half of them, or all. A step then sums the keys that its
tokens meet (:func:`mean_causal_keys_of`), and :func:`flops_per_key` turns them into operations.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtron.models.config import ModelConfig

_FORWARD_BACKWARD = 6


class FlopsPerToken(NamedTuple):
    """Floating-point operations of one token, forward and backward [FLOP]."""

    causal: float
    full_attention: float


def flops_per_token(model: ModelConfig, seq_length: int) -> FlopsPerToken:
    """Operations of one token in a sequence of ``seq_length`` tokens, in both conventions.

    Args:
        model: the architecture.
        seq_length: tokens in a row of the batch.
    """
    query = model.head_dim * model.num_attention_heads
    key_value = model.head_dim * model.query_groups
    attention = model.hidden_size * (query + 2 * key_value) + query * model.hidden_size
    scored = 2 * query
    if model.multi_latent_attention:
        attention = _latent_attention(model)
        scored = model.num_attention_heads * (model.head_dim + model.v_head_dim)
    mlp = model.hidden_size * (_active_ffn(model) * (3 if model.gated else 2))
    if model.num_experts is not None:
        mlp += model.hidden_size * model.num_experts  # the router
    output = model.hidden_size * model.padded_vocab_size
    dense = model.hidden_size * model.ffn_hidden_size * (3 if model.gated else 2)
    without = _layers_without_experts(model)
    blocks = without * dense + (model.num_layers - without) * mlp
    ahead = model.mtp_num_layers or 0
    deeper = ahead * (2 * model.hidden_size**2 + attention + mlp + output)
    products = model.num_layers * attention + blocks + output + deeper

    def total(keys_per_query: float) -> float:
        scores_and_values = scored * keys_per_query
        return _FORWARD_BACKWARD * (products + (model.num_layers + ahead) * scores_and_values)

    return FlopsPerToken(
        causal=total(mean_causal_keys(seq_length, model.window_size)),
        full_attention=total(seq_length),
    )


def _latent_attention(model: ModelConfig) -> int:
    """Elements of the matrices of multi-head latent attention."""
    hidden, heads, latent = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    query = heads * model.head_dim
    queries = hidden * query
    if model.q_lora_rank is not None:
        queries = model.q_lora_rank * (hidden + query)
    down = hidden * (latent + model.qk_pos_emb_head_dim)
    up = latent * heads * (model.qk_head_dim + model.v_head_dim)
    return queries + down + up + heads * model.v_head_dim * hidden


def _layers_without_experts(model: ModelConfig) -> int:
    """Layers with an MLP in a model whose others have experts."""
    return model.layer_pattern.count(0)


def _active_ffn(model: ModelConfig) -> int:
    """Inner channels that a token passes in a layer."""
    if model.num_experts is None:
        return model.ffn_hidden_size
    shared = model.moe_shared_expert_intermediate_size or 0
    return model.moe_router_topk * model.expert_ffn + shared


def _total_ffn(model: ModelConfig) -> int:
    """Inner channels that a layer has."""
    if model.num_experts is None:
        return model.ffn_hidden_size
    shared = model.moe_shared_expert_intermediate_size or 0
    return model.num_experts * model.expert_ffn + shared


def mean_causal_keys(seq_length: int, window_size: int | None = None) -> float:
    """Keys that a query meets on average under a causal mask, in the continuous count.

    Args:
        seq_length: tokens in a row.
        window_size: keys that a query sees at most, itself included; None: no limit.
    """
    if window_size is None or window_size >= seq_length:
        return seq_length / 2
    return window_size - window_size**2 / (2 * seq_length)


def mean_causal_keys_of(lengths: jax.Array, window_size: int | None = None) -> jax.Array:
    """:func:`mean_causal_keys` of every sequence length of an array, fp32; 0 for length 0."""
    n = lengths.astype(jnp.float32)
    if window_size is None:
        return n / 2
    in_window = window_size - window_size**2 / (2 * jnp.maximum(n, 1))
    return jnp.where(n <= window_size, n / 2, in_window)


def flops_per_key(model: ModelConfig) -> float:
    """Operations of a token for every key that it meets, in all layers [FLOP]."""
    return flops_per_token(model, 1).full_attention - flops_per_token(model, 0).full_attention


def parameter_count(model: ModelConfig, *, padded_vocab: bool = True) -> int:
    """Number of parameters of the whole model.

    Args:
        model: the architecture.
        padded_vocab: count the vocabulary's rows as stored; False: only those of real tokens, which
            is what published sizes count.
    """
    hidden = model.hidden_size
    query = model.head_dim * model.num_attention_heads
    key_value = model.head_dim * model.query_groups
    vocab = model.padded_vocab_size if padded_vocab else model.vocab_size
    norm_vectors = 2 if model.normalization == "LayerNorm" else 1
    halves = 2 if model.gated else 1

    attention = hidden * (query + 2 * key_value) + query * hidden
    if model.add_bias_linear or model.add_qkv_bias:
        attention += query + 2 * key_value
    if model.add_bias_linear:
        attention += hidden
    if model.qk_layernorm:
        attention += 2 * norm_vectors * model.head_dim

    if model.multi_latent_attention:
        attention = _latent_attention(model)
        attention += norm_vectors * (model.kv_lora_rank + (model.q_lora_rank or 0))

    dense = hidden * model.ffn_hidden_size * (halves + 1)
    mlp = hidden * _total_ffn(model) * (halves + 1)
    if model.add_bias_linear:
        mlp += halves * model.ffn_hidden_size + hidden
    if model.num_experts is not None:
        mlp += model.num_experts * (hidden + model.moe_router_enable_expert_bias)
        mlp += hidden * model.moe_shared_expert_gate

    without = _layers_without_experts(model)
    layers = without * dense + (model.num_layers - without) * mlp
    layers += model.num_layers * (attention + 2 * norm_vectors * hidden)
    # a depth of multi-token prediction: its layer, its projection, three norms
    one = mlp + attention + 2 * norm_vectors * hidden
    layers += (model.mtp_num_layers or 0) * (one + 2 * hidden**2 + 3 * norm_vectors * hidden)
    embeddings = vocab * hidden
    if model.untie_embeddings_and_output_weights:
        embeddings += vocab * hidden
    if model.position_embedding_type == "learned_absolute":
        embeddings += model.max_position_embeddings * hidden
    return layers + norm_vectors * hidden + embeddings
