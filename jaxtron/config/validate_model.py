"""What the shape of a model, its sequence and its recomputation must keep to on any mesh."""

from collections.abc import Callable, Iterator, Mapping

from jaxtron.config.choices import divisors_near, either, multiples_near
from jaxtron.config.config import Config
from jaxtron.errors import ConfigError
from jaxtron.layers.rope import rope_scaling_parameters

Axes = Mapping[str, int]


def _heads_divide_hidden_size(config: Config) -> Iterator[str]:
    model = config.model
    derived = model.kv_channels is None and not model.multi_latent_attention
    if derived and model.hidden_size % model.num_attention_heads:
        yield (
            f"model.hidden_size {model.hidden_size} is not a multiple of "
            f"model.num_attention_heads {model.num_attention_heads}: set model.kv_channels to the "
            f"size of a head, or model.num_attention_heads to "
            f"{either(divisors_near(model.hidden_size, model.num_attention_heads))}"
        )


def _groups_divide_heads(config: Config) -> Iterator[str]:
    heads, groups = config.model.num_attention_heads, config.model.query_groups
    if heads % groups:
        yield (
            f"model.num_query_groups {groups} does not divide model.num_attention_heads {heads}: "
            f"set model.num_query_groups to {either(divisors_near(heads, groups))}"
        )


def _rotary_channels_are_pairs(config: Config) -> Iterator[str]:
    model = config.model
    if model.position_embedding_type != "rope":
        return
    rotated = model.rotary_channels
    if model.multi_latent_attention and rotated % 2:
        yield (
            f"model.qk_pos_emb_head_dim is {rotated}, but RoPE rotates pairs of channels: set it "
            f"to {either(multiples_near(int(rotated), 2))}"
        )
    elif rotated % 2 or rotated == 0:
        yield (
            f"model.rotary_percent {model.rotary_percent} of {model.head_dim} channels a head is "
            f"{rotated:g}, but RoPE rotates pairs of channels: set model.rotary_percent, or "
            "model.kv_channels (a head's channels), so that the number is even"
        )


def _rope_scaling_fits(config: Config) -> Iterator[str]:
    model = config.model
    if model.rope_scaling is None or model.position_embedding_type != "rope":
        return
    try:
        rope_scaling_parameters(model)
    except ConfigError as error:
        yield str(error)


def _sequence_fits_positions(config: Config) -> Iterator[str]:
    longest, seq_length = config.model.max_position_embeddings, config.data.seq_length
    if seq_length > longest:
        yield (
            f"data.seq_length {seq_length} is longer than model.max_position_embeddings {longest}: "
            f"set model.max_position_embeddings to {seq_length}, or data.seq_length to {longest} "
            "or less"
        )


def _eod_is_a_token(config: Config) -> Iterator[str]:
    eod, vocab_size = config.data.eod_token, config.model.vocab_size
    if eod is not None and eod >= vocab_size:
        yield (
            f"data.eod_token {eod} is not below model.vocab_size {vocab_size}: set data.eod_token "
            f"to an id from 0 to {vocab_size - 1}, or model.vocab_size to {eod + 1} or more"
        )


def _recompute_method_fits(config: Config) -> Iterator[str]:
    train, layers = config.train, config.model.num_layers
    method, count = train.recompute_method, train.recompute_num_layers
    if method is None:
        return
    if count is None:
        yield (
            f"train.recompute_method is {method} but train.recompute_num_layers is null: set "
            f"train.recompute_num_layers to a number from 1 to {layers}, or "
            "train.recompute_method to null"
        )
    elif count > layers:
        yield (
            f"train.recompute_num_layers {count} is more than model.num_layers {layers}: set it to "
            f"{layers} or less"
        )


def _tokens_ahead_can_be_predicted(config: Config) -> Iterator[str]:
    model = config.model
    depths = model.mtp_num_layers
    if depths is None:
        return
    if model.position_embedding_type == "learned_absolute":
        yield (
            f"model.mtp_num_layers is {depths} and model.position_embedding_type is "
            "learned_absolute: the last position has no embedding further ahead; set "
            "model.position_embedding_type to rope, or model.mtp_num_layers to null"
        )
    if depths >= config.data.seq_length:
        most = config.data.seq_length - 1
        yield (
            f"model.mtp_num_layers {depths} is not less than data.seq_length "
            f"{config.data.seq_length}: nothing is that far ahead; set it to "
            + (f"{most} or less" if most else "null")
        )


def _fused_mlp_is_there(config: Config) -> Iterator[str]:
    model = config.model
    if model.gated_mlp_backend != "mosaic_gpu":
        return
    shown, otherwise = "model.gated_mlp_backend is mosaic_gpu", "model.gated_mlp_backend to auto"
    all_experts = model.num_experts is not None and all(model.layer_pattern)
    if all_experts and model.moe_shared_expert_intermediate_size is None:
        yield (
            f"{shown}, but every layer has experts (model.num_experts {model.num_experts}, "
            f"model.moe_layer_freq {model.moe_layer_freq}) and none of them is shared, so there is "
            f"no MLP that it would compute: set {otherwise} (model.moe_grouped_gemm_backend "
            "chooses the experts' kernel)"
        )
    elif model.activation != "swiglu" or model.add_bias_linear:
        biases = " with model.add_bias_linear" if model.add_bias_linear else ""
        yield (
            f"{shown}, but it computes swiglu without biases alone and model.activation is "
            f"{model.activation}{biases}: set {otherwise} or xla"
        )


SHAPE_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _heads_divide_hidden_size,
    _groups_divide_heads,
    _rotary_channels_are_pairs,
    _rope_scaling_fits,
    _sequence_fits_positions,
    _eod_is_a_token,
    _recompute_method_fits,
    _tokens_ahead_can_be_predicted,
    _fused_mlp_is_there,
)
"""Checks that hold on any mesh; each yields ``what is wrong: what would be right``."""
