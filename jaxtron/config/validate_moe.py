"""Combinations of keys of experts and latent attention that cannot work, each with its fix."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from jaxtron.config.choices import either, multiples_near
from jaxtron.config.config import Config
from jaxtron.errors import ConfigError
from jaxtron.mesh.rules import make_rules
from jaxtron.models.config import ModelConfig
from jaxtron.precision.fp8_layers import has_layer_exceptions


def _choices_fit_experts(config: Config) -> Iterator[str]:
    model = config.model
    experts, topk = model.num_experts, model.moe_router_topk
    if experts is None:
        return
    if topk > experts:
        yield (
            f"model.moe_router_topk {topk} is more than model.num_experts {experts}: set it to "
            f"{experts} or less"
        )
    groups, kept = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None and kept is None:
        return
    if groups is None or kept is None:
        given = "moe_router_group_topk" if groups is None else "moe_router_num_groups"
        missing = "moe_router_num_groups" if groups is None else "moe_router_group_topk"
        yield f"model.{given} is set but model.{missing} is null: set both, or both to null"
    elif experts % groups or kept > groups or topk % kept or topk // kept > experts // groups:
        yield (
            f"group-limited routing of model.num_experts {experts} in model.moe_router_num_groups "
            f"{groups}, model.moe_router_group_topk {kept}, model.moe_router_topk {topk}: groups "
            "must divide the experts, group_topk must be at most the groups and divide topk, and "
            "topk / group_topk at most the experts of a group"
        )


def _router_keys_agree(config: Config) -> Iterator[str]:
    model = config.model
    if model.num_experts is None:
        return
    sigmoid = model.moe_router_score_function == "sigmoid"
    if model.moe_router_pre_softmax and sigmoid:
        yield (
            "model.moe_router_pre_softmax is true but model.moe_router_score_function is sigmoid: "
            "set moe_router_pre_softmax to false, or the score function to softmax"
        )
    sinkhorn = model.moe_router_load_balancing_type == "sinkhorn"
    alone = model.moe_router_topk == 1 and not sigmoid and not sinkhorn
    if alone and not model.moe_router_pre_softmax:
        yield (
            "model.moe_router_topk is 1 with softmax after the choice, so every weight is 1 and "
            "the router learns nothing: set model.moe_router_pre_softmax to true"
        )
    if model.moe_router_enable_expert_bias and not sigmoid:
        yield (
            "model.moe_router_enable_expert_bias is for sigmoid scores, but "
            "model.moe_router_score_function is softmax: set it to sigmoid, or the bias to false"
        )
    if model.moe_aux_loss_coeff and model.moe_router_load_balancing_type in ("sinkhorn", "none"):
        yield (
            f"model.moe_aux_loss_coeff is {model.moe_aux_loss_coeff} but "
            f"model.moe_router_load_balancing_type is {model.moe_router_load_balancing_type}, "
            "which has no loss: set the coefficient to 0, or the type to seq_aux_loss, aux_loss or "
            "global_aux_loss"
        )
    if model.moe_router_load_balancing_type == "global_aux_loss":
        for name, why in (
            ("moe_router_enable_expert_bias", "choices that the loss does not count"),
            ("moe_router_num_groups", "choices that the loss does not count"),
            ("mtp_num_layers", "layers whose loads are not carried between microbatches"),
        ):
            if getattr(model, name):
                yield (
                    f"model.{name} makes {why}, and global_aux_loss adds up the loads of the "
                    "step's microbatches: set model.moe_router_load_balancing_type to seq_aux_loss "
                    f"or aux_loss, or model.{name} to {_shown(_default(name))}"
                )
    if sinkhorn:
        for name in (
            "moe_router_pre_softmax",
            "moe_router_enable_expert_bias",
            "moe_router_num_groups",
            "moe_router_topk_scaling_factor",
        ):
            if getattr(model, name):
                yield (
                    f"model.{name} has no effect with model.moe_router_load_balancing_type "
                    f"sinkhorn: set it to {_shown(_default(name))}"
                )
        if sigmoid:
            yield (
                "model.moe_router_score_function has no effect with "
                "model.moe_router_load_balancing_type sinkhorn (sigmoid for one expert a token, "
                "softmax for more): leave it out"
            )
        if model.moe_router_force_load_balancing:
            yield (
                "model.moe_router_load_balancing_type is sinkhorn, but "
                "model.moe_router_force_load_balancing is true, under which experts are taken by "
                "turns and nothing is assigned: set model.moe_router_load_balancing_type to none, "
                "or model.moe_router_force_load_balancing to false"
            )


def _every_layer_has_a_kind(config: Config) -> Iterator[str]:
    model = config.model
    pattern = model.moe_layer_freq
    if isinstance(pattern, int):
        if pattern < 1:
            yield (
                f"model.moe_layer_freq is {pattern}: set it to 1 (every layer has experts), to N "
                "(layers 0, N, 2 N and so on), or to a list of a 0 or 1 for each layer"
            )
        return
    if len(pattern) != model.num_layers or set(pattern) - {0, 1}:
        yield (
            f"model.moe_layer_freq has {len(pattern)} entries {sorted(set(pattern))} for "
            f"{model.num_layers} layers: give a 0 (dense) or 1 (experts) for each layer"
        )
    elif not any(pattern):
        yield (
            "model.moe_layer_freq has no layer with experts: give one of them a 1, or set "
            "model.num_experts to null"
        )


def _fp8_exceptions_are_for_all_layers(config: Config) -> Iterator[str]:
    model = config.model
    if not has_layer_exceptions(config.precision):
        return
    why = None
    if len(model.layer_block) > 1:
        why = f"blocks of {len(model.layer_block)} layers of both kinds are alike in FP8"
    elif model.num_dense_layers:
        why = f"the first {model.num_dense_layers} layers are dense and never in FP8"
    if why is not None:
        yield (
            f"by model.moe_layer_freq {why}: set precision.first_last_layers_bf16 to false, and "
            "give precision.fp8_exceptions for all layers ('*/mlp/down')"
        )


def _latent_attention_keys_agree(config: Config) -> Iterator[str]:
    model = config.model
    if not model.multi_latent_attention:
        return
    for name in ("num_query_groups", "kv_channels", "qk_layernorm", "add_bias_linear"):
        if getattr(model, name):
            yield (
                f"model.{name} is {_shown(getattr(model, name))}, but latent attention does not "
                f"use it (its latents are always normalised, and heads have keys of their own): "
                f"set it to {_shown(_default(name))}"
            )
    if model.add_qkv_bias or model.rotary_percent != 1:
        yield (
            "model.add_qkv_bias and model.rotary_percent do not exist in latent attention: leave "
            "them out (model.qk_pos_emb_head_dim says how many channels are rotated)"
        )
    if model.position_embedding_type != "rope":
        yield (
            f"model.position_embedding_type is {model.position_embedding_type}, but latent "
            "attention rotates a part of its channels: set it to rope"
        )
    if model.v_head_dim > model.head_dim:
        yield (
            f"model.v_head_dim {model.v_head_dim} is more than model.qk_head_dim "
            f"{model.qk_head_dim} + model.qk_pos_emb_head_dim {model.qk_pos_emb_head_dim}: set it "
            f"to {model.head_dim} or less"
        )


def _latent_products_are_in_bf16(config: Config) -> Iterator[str]:
    fp8 = config.precision.fp8
    if fp8 is not None and config.model.multi_latent_attention:
        yield (
            f"precision.fp8 is {fp8}, but products of model.multi_latent_attention have no FP8 "
            "form in this version: set precision.fp8 to null"
        )


def _experts_have_no_biases(config: Config) -> Iterator[str]:
    model = config.model
    if model.num_experts is not None and model.add_bias_linear:
        yield (
            "model.add_bias_linear is true, but experts have no biases: set it to false "
            "(model.add_qkv_bias gives attention its own)"
        )


def _experts_split(config: Config, axes: Mapping[str, int]) -> Iterator[str]:
    model = config.model
    if model.num_experts is None:
        if axes["expert"] > 1:
            yield (
                f"parallel.expert is {axes['expert']}, but model.num_experts is null: set "
                "parallel.expert to 1 (parallel.fsdp or parallel.data split the batch)"
            )
        return
    try:
        rules = make_rules(config.parallel.rules, axes)
    except ConfigError:
        return  # reported with the rules
    for what, dimension, size in (
        ("num_experts", "experts", model.num_experts),
        (
            "ffn_hidden_size" if model.moe_ffn_hidden_size is None else "moe_ffn_hidden_size",
            "expert_mlp",
            model.expert_ffn,
        ),
        (
            "moe_shared_expert_intermediate_size",
            "mlp",
            model.moe_shared_expert_intermediate_size or rules.size("mlp"),
        ),
    ):
        parts = rules.size(dimension)
        if size % parts:
            split = rules.axes(dimension)
            over = " × ".join(f"parallel.{a} {axes[a]}" for a in split)
            product = f" = {parts}" if len(split) > 1 else ""
            yield (
                f"model.{what} {size} is not a multiple of {over}{product}: choose sizes of these "
                f"axes whose product divides {size}, or change parallel.rules.{dimension}"
            )
    shared = set(rules.axes("experts")) & set(rules.axes("expert_mlp"))
    if shared:
        axis = sorted(shared)[0]
        yield (
            f"parallel.rules.experts and parallel.rules.expert_mlp both use {axis}: set "
            "parallel.rules.expert_mlp to null"
        )
    parts, seq_length = axes["context"] * axes["tensor"], config.data.seq_length
    if axes["tensor"] > 1 and not rules.axes("expert_mlp") and seq_length % parts:
        yield (
            f"data.seq_length {seq_length} is not a multiple of parallel.context "
            f"{axes['context']} × parallel.tensor {axes['tensor']}, which share the tokens of an "
            "MoE layer when parallel.rules.expert_mlp is null: set data.seq_length to "
            f"{either(multiples_near(seq_length, parts))}, or parallel.rules.expert_mlp to tensor"
        )


def _default(name: str) -> object:
    return next(f.default for f in dataclasses.fields(ModelConfig) if f.name == name)


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower()


MOE_MODEL_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _choices_fit_experts,
    _router_keys_agree,
    _experts_have_no_biases,
    _every_layer_has_a_kind,
    _fp8_exceptions_are_for_all_layers,
    _latent_attention_keys_agree,
    _latent_products_are_in_bf16,
)

MOE_LAYOUT_CHECKS: tuple[Callable[[Config, Mapping[str, int]], Iterator[str]], ...] = (
    _experts_split,
)
