"""Mixture-of-experts keys that cannot work are refused with the fix, and the fix works."""

import pytest

from jaxtron.config.load import load_config
from jaxtron.config.validate import validate, validate_for_training
from jaxtron.errors import ConfigError

EXPERTS = ["model.num_experts=8", "model.moe_ffn_hidden_size=32"]
SIGMOID = "model.moe_router_score_function=sigmoid"

# (overrides, words of the message, overrides that fix it)
REFUSED = {
    "keys_without_experts": (
        ["model.moe_aux_loss_coeff=0.1", "model.moe_router_load_balancing_type=aux_loss"],
        [
            "model.moe_aux_loss_coeff is 0.1",
            "model.moe_router_load_balancing_type is aux_loss",
            "num_experts is null",
            "model.moe_aux_loss_coeff at 0.0",
            "model.moe_router_load_balancing_type at seq_aux_loss",
        ],
        ["model.num_experts=4"],
    ),
    "expert_axis_without_experts": (
        ["parallel.expert=2"],
        ["parallel.expert is 2", "parallel.expert to 1"],
        ["parallel.expert=1"],
    ),
    "more_choices_than_experts": (
        ["model.num_experts=2", "model.moe_router_topk=3"],
        ["moe_router_topk 3", "model.num_experts 2"],
        ["model.moe_router_topk=2"],
    ),
    "half_a_group_limit": (
        [*EXPERTS, "model.moe_router_num_groups=4"],
        ["moe_router_num_groups is set but model.moe_router_group_topk is null"],
        ["model.moe_router_group_topk=2"],
    ),
    "groups_do_not_fit": (
        [*EXPERTS, "model.moe_router_num_groups=3", "model.moe_router_group_topk=2"],
        ["moe_router_num_groups 3", "divide"],
        ["model.moe_router_num_groups=4"],
    ),
    "one_choice_after_softmax": (
        [*EXPERTS, "model.moe_router_topk=1"],
        ["moe_router_topk is 1", "moe_router_pre_softmax to true"],
        ["model.moe_router_pre_softmax=true"],
    ),
    "pre_softmax_of_sigmoid": (
        [*EXPERTS, SIGMOID, "model.moe_router_pre_softmax=true"],
        ["moe_router_pre_softmax", "sigmoid"],
        ["model.moe_router_pre_softmax=false"],
    ),
    "bias_on_softmax": (
        [*EXPERTS, "model.moe_router_enable_expert_bias=true"],
        ["moe_router_enable_expert_bias", "sigmoid"],
        [SIGMOID],
    ),
    "loss_without_a_kind": (
        [
            *EXPERTS,
            "model.moe_router_load_balancing_type=none",
            "model.moe_aux_loss_coeff=0.1",
        ],
        ["moe_aux_loss_coeff is 0.1", "none"],
        ["model.moe_aux_loss_coeff=0"],
    ),
    "kind_of_a_loss_without_weight": (
        [*EXPERTS, "model.moe_router_load_balancing_type=aux_loss"],
        ["moe_router_load_balancing_type is aux_loss", "moe_aux_loss_coeff is 0.0", "to none"],
        ["model.moe_aux_loss_coeff=0.01"],
    ),
    "fused_mlp_without_an_mlp": (
        [*EXPERTS, "model.gated_mlp_backend=mosaic_gpu"],
        ["gated_mlp_backend is mosaic_gpu", "num_experts 8", "moe_layer_freq 1", "to auto"],
        ["model.gated_mlp_backend=auto"],
    ),
    "fused_mlp_of_another_activation": (
        ["model.gated_mlp_backend=mosaic_gpu", "model.activation=geglu"],
        ["gated_mlp_backend is mosaic_gpu", "swiglu", "activation is geglu", "to auto"],
        ["model.activation=swiglu"],
    ),
    "scaled_sinkhorn": (
        [
            *EXPERTS,
            "model.moe_router_load_balancing_type=sinkhorn",
            "model.moe_router_topk_scaling_factor=2.0",
        ],
        ["moe_router_topk_scaling_factor", "sinkhorn"],
        ["model.moe_router_topk_scaling_factor=null"],
    ),
    "sinkhorn_of_forced_balance": (
        [
            *EXPERTS,
            "model.moe_router_load_balancing_type=sinkhorn",
            "model.moe_router_force_load_balancing=true",
        ],
        [
            "moe_router_load_balancing_type is sinkhorn",
            "moe_router_force_load_balancing is true",
            "moe_router_load_balancing_type to none",
        ],
        ["model.moe_router_load_balancing_type=none"],
    ),
    "policy_without_capacity": (
        [*EXPERTS, "model.moe_token_drop_policy=position"],
        ["moe_token_drop_policy is position", "moe_expert_capacity_factor"],
        ["model.moe_expert_capacity_factor=1.0"],
    ),
    "biases_in_experts": (
        [*EXPERTS, "model.add_bias_linear=true"],
        ["add_bias_linear", "experts have no biases"],
        ["model.add_bias_linear=false"],
    ),
    "gate_without_shared_expert": (
        [*EXPERTS, "model.moe_shared_expert_gate=true"],
        ["moe_shared_expert_gate is true", "moe_shared_expert_intermediate_size is null"],
        ["model.moe_shared_expert_intermediate_size=32"],
    ),
    "rate_of_a_bias_without_bias": (
        [*EXPERTS, "model.moe_router_bias_update_rate=0.01"],
        ["moe_router_bias_update_rate is 0.01", "moe_router_enable_expert_bias is false"],
        ["model.moe_router_score_function=sigmoid", "model.moe_router_enable_expert_bias=true"],
    ),
    "experts_do_not_split": (
        ["model.num_experts=6", "parallel.expert=4"],
        ["model.num_experts 6", "parallel.expert 4"],
        ["parallel.expert=2"],
    ),
    "expert_ffn_does_not_split": (
        ["model.num_experts=4", "model.moe_ffn_hidden_size=6", "parallel.tensor=4"],
        ["moe_ffn_hidden_size 6", "parallel.tensor 4"],
        ["parallel.tensor=2"],
    ),
    "no_layer_with_experts": (
        [*EXPERTS, "model.moe_layer_freq=[0, 0, 0, 0]"],
        ["no layer with experts"],
        ["model.moe_layer_freq=[0, 1, 1, 0]"],
    ),
    "pattern_of_a_number_below_one": (
        [*EXPERTS, "model.moe_layer_freq=0"],
        ["moe_layer_freq is 0"],
        ["model.moe_layer_freq=2"],
    ),
    "one_block_on_two_stages": (
        [*EXPERTS, "model.moe_layer_freq=4", "parallel.pipeline=2"],
        ["num_layers 4 has 1 blocks of 4", "num_layers to 8", "blocks of 4 layers"],
        ["model.moe_layer_freq=2"],
    ),
    "layers_of_both_kinds_and_layers_out_of_fp8": (
        [
            *EXPERTS,
            "model.moe_layer_freq=2",
            "precision.fp8=current",
            "precision.fp8_exceptions=['0/*']",
        ],
        ["blocks of 2 layers", "'*/mlp/down'"],
        ["precision.fp8_exceptions=['*/mlp/down']"],
    ),
    "pattern_of_another_length": (
        [*EXPERTS, "model.moe_layer_freq=[0, 1]"],
        ["2 entries", "4 layers"],
        ["model.moe_layer_freq=[0, 1, 1, 1]"],
    ),
    "dense_layers_in_a_pipeline": (
        [*EXPERTS, "model.moe_layer_freq=[0, 1, 1, 1]", "parallel.pipeline=2"],
        ["num_layers 4 has 3 layers to place", "num_layers to 3 or 5", "the first 1 layers"],
        ["parallel.pipeline_layout=Ett|tL"],
    ),
    "dense_layers_and_layers_out_of_fp8": (
        [
            *EXPERTS,
            "model.moe_layer_freq=[0, 1, 1, 1]",
            "precision.fp8=current",
            "precision.first_last_layers_bf16=true",
        ],
        ["first 1 layers are dense", "first_last_layers_bf16 to false"],
        ["precision.first_last_layers_bf16=false"],
    ),
    "latent_keys_without_latent_attention": (
        ["model.kv_lora_rank=64"],
        ["model.kv_lora_rank", "multi_latent_attention to true|set that to true"],
        ["model.multi_latent_attention=true", "model.num_query_groups=null"],
    ),
    "groups_of_latent_attention": (
        ["model.multi_latent_attention=true", "model.num_query_groups=2"],
        ["model.num_query_groups is 2"],
        ["model.num_query_groups=null"],
    ),
    "rotated_channels_that_are_no_pairs": (
        [
            "model.multi_latent_attention=true",
            "model.num_query_groups=null",
            "model.qk_pos_emb_head_dim=7",
        ],
        ["model.qk_pos_emb_head_dim is 7, but RoPE rotates pairs of channels: set it to 6 or 8"],
        ["model.qk_pos_emb_head_dim=6"],
    ),
    "values_wider_than_keys": (
        [
            "model.multi_latent_attention=true",
            "model.num_query_groups=null",
            "model.v_head_dim=256",
        ],
        ["v_head_dim 256", "192"],
        ["model.v_head_dim=192"],
    ),
    "fp8_experts_without_experts": (
        ["precision.fp8=current", "precision.fp8_experts=true"],
        ["precision.fp8_experts is true", "num_experts is null"],
        ["precision.fp8_experts=false"],
    ),
    "fp8_experts_without_fp8": (
        [*EXPERTS, "precision.fp8_experts=true"],
        ["precision.fp8_experts is true", "precision.fp8 is null"],
        ["precision.fp8=current"],
    ),
    "fp8_latent_attention": (
        [
            "model.multi_latent_attention=true",
            "model.num_query_groups=null",
            "precision.fp8=current",
        ],
        ["precision.fp8 is current", "multi_latent_attention"],
        ["precision.fp8=null"],
    ),
    "one_axis_twice": (
        [*EXPERTS, "parallel.tensor=2", "parallel.rules={experts: [expert, tensor]}"],
        ["rules.experts and parallel.rules.expert_mlp both use tensor"],
        ["parallel.rules={experts: [expert, tensor], expert_mlp: null}"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_fix_that_works(name: str) -> None:
    overrides, words, fix = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        validate(load_config({"preset": "tiny"}, overrides), 8)
    for word in words:
        assert any(choice in str(error.value) for choice in word.split("|"))
    validate(load_config({"preset": "tiny"}, [*overrides, *fix]), 8)


@pytest.mark.parametrize("latent", ["true", "false"])
def test_heads_that_do_not_split_are_one_mistake(latent: str) -> None:
    """Without ``num_query_groups`` there are no groups of which to complain besides."""
    overrides = [
        "model.num_attention_heads=3",
        "model.num_query_groups=null",
        "model.kv_channels=null" if latent == "true" else "model.kv_channels=16",
        f"model.multi_latent_attention={latent}",
        "parallel.tensor=2",
    ]
    with pytest.raises(ConfigError) as error:
        validate(load_config({"preset": "tiny"}, overrides), 8)
    (message,) = str(error.value).splitlines()
    assert message.startswith("model.num_attention_heads 3 is not a multiple of parallel.tensor 2")


@pytest.mark.parametrize(
    "name", ["mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v2_lite", "deepseek_v3"]
)
def test_balance_may_be_forced_on_every_preset_with_experts(name: str) -> None:
    validate(load_config(name, ["model.moe_router_force_load_balancing=true"]), 512)


def test_experts_narrower_than_the_mlp_are_no_copies_of_it() -> None:
    overrides = [*EXPERTS, "checkpoint.load=/dense", "checkpoint.moe_use_upcycling=true"]
    with pytest.raises(ConfigError, match="moe_ffn_hidden_size is 32 .* set .* to null"):
        validate_for_training(load_config({"preset": "tiny"}, overrides), 8)
    fix = "model.moe_ffn_hidden_size=null"
    validate_for_training(load_config({"preset": "tiny"}, [*overrides, fix]), 8)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*EXPERTS, "model.moe_layer_freq=[0, 1, 1, 1]"],
        [*EXPERTS, "model.moe_shared_expert_intermediate_size=32"],
    ],
)
def test_the_fused_mlp_may_be_asked_for_where_there_is_one(overrides: list[str]) -> None:
    validate(load_config({"preset": "tiny"}, [*overrides, "model.gated_mlp_backend=mosaic_gpu"]), 8)
