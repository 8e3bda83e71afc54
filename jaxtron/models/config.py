"""Configuration of the model."""

from typing import Any, Literal

from jaxtron.config.fields import key, section
from jaxtron.models.layer_pattern import Pattern, cut_pattern, layer_pattern


@section
class ModelConfig:
    """Shape and architecture of a decoder; names are Megatron's where it has one."""

    architecture: Literal["decoder"] = key(
        "decoder", "Model family: a name in jaxtron/models/architectures.py."
    )
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
    multi_latent_attention: bool = key(
        False, "Keys and values from a latent shared by the heads (MLA of DeepSeek-V2)."
    )
    q_lora_rank: int | None = key(
        None, "MLA: channels of the queries' latent; null: queries from the stream.", ge=1
    )
    kv_lora_rank: int = key(512, "MLA: channels of the keys' and values' latent.", ge=1)
    qk_head_dim: int = key(128, "MLA: channels of a query or key without rotation.", ge=1)
    qk_pos_emb_head_dim: int = key(
        64, "MLA: channels of a query or key that are rotated; keys share them.", ge=2
    )
    v_head_dim: int = key(128, "MLA: channels of a value.", ge=1)
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
    attention_backend: Literal["auto", "xla", "cudnn", "mosaic_gpu"] = key(
        "auto", "Attention kernel."
    )
    gated_mlp_backend: Literal["auto", "xla", "mosaic_gpu"] = key(
        "auto", "Kernel of bf16 MLPs with swiglu; mosaic_gpu multiplies and activates in one."
    )

    num_experts: int | None = key(
        None, "Experts of an MoE layer, which replace its MLP; null: dense layers.", ge=1
    )
    moe_layer_freq: list[int] | int = key(
        1,
        "N: layers 0, N, 2 N and so on have experts, the others an MLP; or a list of a 0 (MLP) or "
        "1 (experts) for each layer.",
    )
    moe_ffn_hidden_size: int | None = key(
        None, "Inner width of an expert; null: ffn_hidden_size.", ge=1
    )
    moe_router_topk: int = key(2, "Experts that a token goes to.", ge=1)
    moe_router_score_function: Literal["softmax", "sigmoid"] = key(
        "softmax", "Scores of the experts; with sigmoid the chosen ones are divided by their sum."
    )
    moe_router_pre_softmax: bool = key(
        False, "Softmax over all experts before the top-k, instead of over the chosen ones."
    )
    moe_router_topk_scaling_factor: float | None = key(
        None, "Factor on the weights of the chosen experts.", gt=0
    )
    moe_router_num_groups: int | None = key(
        None, "Groups of experts for group-limited routing; null: none.", ge=1
    )
    moe_router_group_topk: int | None = key(
        None, "Groups that a token's experts are chosen from.", ge=1
    )
    moe_router_load_balancing_type: Literal[
        "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"
    ] = key(
        "seq_aux_loss",
        "Unit of the balancing loss: a microbatch over all data shards, a sequence, or all of the "
        "step's microbatches so far; sinkhorn: balanced assignment without a loss.",
    )
    moe_aux_loss_coeff: float = key(0.0, "Weight of the balancing loss.", ge=0)
    moe_z_loss_coeff: float | None = key(
        None, "Weight of the squared log-partition term of router logits; null: none.", ge=0
    )
    moe_input_jitter_eps: float | None = key(
        None, "Router inputs are multiplied by uniform noise in 1 ± eps.", gt=0, lt=1
    )
    moe_router_enable_expert_bias: bool = key(
        False, "Balance without a loss: a bias per expert that only the choice sees."
    )
    moe_router_bias_update_rate: float = key(
        1e-3,
        "Change of the bias per step, up for an expert with less than the mean load; 0: it stays.",
        ge=0,
    )
    moe_router_force_load_balancing: bool = key(
        False, "Benchmarks only: experts by turns, whatever the router says."
    )
    moe_token_dispatcher_type: Literal["auto", "allgather", "alltoall", "ragged"] = key(
        "auto",
        "How tokens reach experts on other devices; auto: alltoall where a capacity makes it send "
        "less than allgather; ragged is for GPUs, and slow within a host.",
    )
    moe_expert_capacity_factor: float | None = key(
        None,
        "An expert takes at most ceil(seq_length * topk / experts * factor) tokens of a sequence; "
        "null: dropless.",
        gt=0,
    )
    moe_token_drop_policy: Literal["probs", "position"] = key(
        "probs", "Who is dropped over capacity: the lowest weights, or the latest tokens."
    )
    moe_grouped_gemm_backend: Literal["auto", "xla", "padded", "bucketed", "mosaic_gpu"] = key(
        "auto", "Kernel of the experts' matrix products."
    )
    moe_shared_expert_intermediate_size: int | None = key(
        None, "Inner width of the shared expert that every token visits; null: none.", ge=1
    )
    moe_shared_expert_gate: bool = key(
        False, "Scale the shared expert by the sigmoid of a learned gate."
    )
    mtp_num_layers: int | None = key(
        None, "Depths of multi-token prediction, each one token further; null: none.", ge=1
    )
    mtp_loss_scaling_factor: float = key(
        0.1, "Weight of the mean loss of the depths of multi-token prediction.", gt=0
    )
    moe_per_layer_logging: bool = key(
        False, "Log the load of the experts layer by layer, with a histogram."
    )

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Channels of one query or key."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_channels(self) -> float:
        """Channels of a query or key that are rotated."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return self.head_dim * self.rotary_percent

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies a gate with an up projection."""
        return self.activation in ("swiglu", "geglu")

    @property
    def random(self) -> bool:
        """Whether training draws random numbers in the layers."""
        noisy = self.hidden_dropout or self.attention_dropout or self.moe_input_jitter_eps
        return bool(noisy)

    @property
    def num_dense_layers(self) -> int:
        """Layers without experts that come first and are parts of their own."""
        return cut_pattern(self.layer_pattern)[0]

    @property
    def layer_pattern(self) -> Pattern:
        """Per layer 1 (experts) or 0 (an MLP), in a model that has experts."""
        return layer_pattern(self.num_layers, self.moe_layer_freq)

    @property
    def layer_block(self) -> Pattern:
        """Kinds of the layers of a block: the stack's layers are this, again and again."""
        return cut_pattern(self.layer_pattern)[1]

    @property
    def stacked_blocks(self) -> int:
        """Blocks in the stack, which a pipeline cuts; most models' blocks are single layers."""
        return (self.num_layers - self.num_dense_layers) // len(self.layer_block)

    @property
    def expert_ffn(self) -> int:
        """Inner width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the stored embedding: vocab_size rounded up."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple
