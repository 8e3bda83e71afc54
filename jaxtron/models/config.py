"""Configuration of the model."""

from typing import Any, Literal

from jaxtron.config.fields import key, section


@section
class ModelConfig:
    """Shape and architecture of a decoder; names are Megatron's where it has one."""

    architecture: Literal["decoder"] = key("decoder", "Model family.")
    num_layers: int = key(help="Transformer layers.", ge=1)
    hidden_size: int = key(help="Width of the residual stream.", ge=1)
    ffn_hidden_size: int = key(help="Inner width of the MLP (of each half for gated ones).", ge=1)
    num_attention_heads: int = key(help="Query heads.", ge=1)
    num_query_groups: int | None = key(
        None, "Key/value heads (GQA); null: num_attention_heads (MHA); 1: MQA.", ge=1
    )
    kv_channels: int | None = key(
        None, "Size of a head; null: hidden_size / num_attention_heads.", ge=1
    )
    vocab_size: int = key(help="Tokens the tokenizer knows.", ge=1)
    make_vocab_size_divisible_by: int = key(
        128, "The stored vocabulary is padded to a multiple of this.", ge=1
    )
    max_position_embeddings: int = key(help="Longest sequence the model accepts.", ge=1)
    normalization: Literal["RMSNorm", "LayerNorm"] = key("RMSNorm", "Kind of norm.")
    layernorm_epsilon: float = key(1.0e-5, "Added to the variance in norms.", gt=0)
    fp32_residual_connection: bool = key(
        False, "Keep the residual stream in fp32 between the layers."
    )
    activation: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu", "squared_relu"] = key(
        "swiglu", "MLP activation; swiglu and geglu are gated; gelu_tanh is GPT-2's."
    )
    add_bias_linear: bool = key(False, "Biases in every linear layer.")
    add_qkv_bias: bool = key(False, "Biases in the query/key/value projection alone.")
    qk_layernorm: bool = key(False, "Normalise queries and keys per head.")
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = key(
        "rope", "How positions enter."
    )
    rotary_base: float = key(10000.0, "Base of the rotary frequencies.", gt=0)
    rotary_percent: float = key(1.0, "Share of a head's channels that is rotated.", gt=0, le=1)
    rope_scaling: dict[str, Any] | None = key(
        None,
        "Context extension: {type: linear, factor}, {type: llama3, factor, low_freq_factor, "
        "high_freq_factor, original_max_position_embeddings} or {type: yarn, factor, beta_fast, "
        "beta_slow, original_max_position_embeddings, mscale}.",
    )
    untie_embeddings_and_output_weights: bool = key(
        True, "Give the output layer its own weight instead of the embedding's."
    )
    init_method_std: float = key(0.02, "Standard deviation of the initial weights.", gt=0)
    attention_dropout: float = key(0.0, "Dropout on attention probabilities.", ge=0, lt=1)
    hidden_dropout: float = key(0.0, "Dropout on block outputs and embeddings.", ge=0, lt=1)
    window_size: int | None = key(
        None, "Sliding window: a query sees itself and window_size - 1 earlier tokens.", ge=1
    )
    attention_backend: Literal["auto", "xla", "cudnn"] = key("auto", "Attention kernel.")

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies a gate with an up projection."""
        return self.activation in ("swiglu", "geglu")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the stored embedding: vocab_size rounded up."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple
