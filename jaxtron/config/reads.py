"""Keys that only some choices read, and the refusal of values that nothing would read.

``READ_UNDER`` is about keys alone; what depends on the sizes of the mesh or on several layers is
with its section in ``validate_*``.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxtron.config.config import Config
from jaxtron.config.dump import to_dict
from jaxtron.config.schema import keys
from jaxtron.config.yaml_io import spelled
from jaxtron.errors import ConfigError

Values = Mapping[str, Mapping[str, Any]]
"""A configuration as plain values, ``{section: {key: value}}``, maybe of an earlier version."""

OWN = "module:function"
"""Stands for every function of the user's own."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A key whose value decides whether others are read.

    Attributes:
        key: ``section.key``.
        among: the values under which they are read; empty: any but null, false, zero or none.
        others: choices of which one is enough in place of this one.
    """

    key: str
    among: tuple[Any, ...] = ()
    others: tuple["Choice", ...] = ()

    def holds(self, values: Values) -> bool:
        """Whether the configuration makes this choice, or one of the others."""
        return self._is_made(values) or any(other.holds(values) for other in self.others)

    def _is_made(self, values: Values) -> bool:
        value = value_of(values, self.key)
        if not self.among:
            return value not in (None, False, 0, [], {})
        return value in self.among or (OWN in self.among and ":" in str(value))

    @property
    def remedy(self) -> str:
        """What makes the choice hold."""
        among = self.among or ((True,) if keys()[self.key].type is bool else ())
        own = f"set {self.key}" + (f" to {' or '.join(map(_shown, among))}" if among else "")
        return ", or ".join([own, *(other.remedy for other in self.others)])

    def reason(self, values: Values, but: str) -> str:
        """The values that keep the choice from holding, that of the key ``but`` left out."""
        shown = [f"{self.key} is {_shown(value_of(values, self.key))}"] if self.key != but else []
        return " and ".join(
            shown + [other.reason(values, but) for other in self.others if other.key != but]
        )


_BUILT_IN = (Choice("optimizer.name", ("adamw", "sgd", "lion", "adafactor", "muon")),)
_ADAM = (Choice("optimizer.name", ("adamw", "muon", OWN)),)
_SGD = (Choice("optimizer.name", ("sgd", OWN)),)
_LION = (Choice("optimizer.name", ("lion", OWN)),)
_ADAFACTOR = (Choice("optimizer.name", ("adafactor", OWN)),)
_MUON = (Choice("optimizer.name", ("muon", OWN)),)
_LR_DECAYS = (
    Choice("optimizer.lr_decay_style", ("linear", "cosine", "inverse-square-root", "WSD")),
)
_WEIGHT_DECAY_GROWS = (
    Choice("optimizer.weight_decay_incr_style", ("linear", "cosine")),
    *_BUILT_IN,
)
_WEIGHTS_DECAY = Choice(
    "optimizer.weight_decay",
    others=(_WEIGHT_DECAY_GROWS[0], Choice("optimizer.name", (OWN,))),
)
_FP16 = (Choice("precision.compute", ("fp16",)),)
_MOVING_SCALE = (*_FP16, Choice("precision.loss_scale", (None,)))
_FP8 = (Choice("precision.fp8"),)
_FP8_DELAYED = (Choice("precision.fp8", ("delayed",)),)
_FP8_ENDS = (*_FP8, Choice("precision.first_last_layers_bf16"))
_ROPE = (Choice("model.position_embedding_type", ("rope",)),)
_LATENT = (Choice("model.multi_latent_attention"),)
_EXPERTS = (Choice("model.num_experts"),)
_FULL_RECOMPUTE = (Choice("train.recompute", ("full",)),)
_DYNAMIC = (Choice("parallel.dynamic_context"),)
_FILES = (Choice("data.source", ("indexed", "chat")),)
_INDEXED = (Choice("data.source", ("indexed",)),)
_CHAT = (Choice("data.source", ("chat",)),)
_FIM = (Choice("data.fim_rate"),)
_DOCUMENTS_END = (
    Choice("data.source", ("indexed", "synthetic", OWN)),
    Choice(
        "data.reset_attention_mask",
        others=(
            Choice("data.reset_position_ids"),
            Choice("data.eod_mask_loss"),
            *_FIM,
            Choice("data.tokenizer"),  # whether padding is masked depends on the two ids
            Choice("data.source", ("synthetic", OWN)),
        ),
    ),
)
_SAVES = (Choice("checkpoint.dir"),)
_LOADS = (Choice("checkpoint.load"),)
_NOT_UPCYCLED = Choice("checkpoint.moe_use_upcycling", (False,))
_EVALUATES_SOMETHING = Choice("eval.iters", others=(Choice("eval.full_validation"),))
_EVALUATES = (Choice("eval.interval"), _EVALUATES_SOMETHING)
_ON_GPUS = (Choice("runtime.cpu_devices", (None,)),)

READ_UNDER: dict[str, tuple[Choice, ...]] = {
    **{key: _EXPERTS for key in keys() if key.startswith("model.moe_")},
    "model.q_lora_rank": _LATENT,
    "model.kv_lora_rank": _LATENT,
    "model.qk_head_dim": _LATENT,
    "model.qk_pos_emb_head_dim": _LATENT,
    "model.v_head_dim": _LATENT,
    "model.rotary_base": _ROPE,
    "model.rotary_percent": _ROPE,
    "model.rope_scaling": _ROPE,
    "model.moe_router_load_balancing_type": (
        *_EXPERTS,
        Choice(
            "model.moe_aux_loss_coeff",
            others=(Choice("model.moe_router_load_balancing_type", ("none", "sinkhorn")),),
        ),
    ),
    "model.moe_router_bias_update_rate": (
        *_EXPERTS,
        Choice("model.moe_router_enable_expert_bias"),
    ),
    "model.moe_token_drop_policy": (*_EXPERTS, Choice("model.moe_expert_capacity_factor")),
    "model.moe_shared_expert_gate": (
        *_EXPERTS,
        Choice("model.moe_shared_expert_intermediate_size"),
    ),
    "model.mtp_loss_scaling_factor": (Choice("model.mtp_num_layers"),),
    "parallel.reshard_after_forward": (Choice("parallel.data_sharding", ("optim_grads_params",)),),
    "parallel.context_all_to_all": (Choice("parallel.context_strategy", ("hierarchical",)),),
    "parallel.min_dynamic_context": _DYNAMIC,
    "parallel.max_seqlen_per_dp_cp_rank": _DYNAMIC,
    "train.recompute_method": _FULL_RECOMPUTE,
    "train.recompute_num_layers": (
        *_FULL_RECOMPUTE,
        Choice("train.recompute_method", ("uniform", "block")),
    ),
    "data.source_options": (Choice("data.source", (OWN,)),),
    "data.paths": _FILES,
    "data.train_paths": _FILES,
    "data.valid_paths": (*_FILES, *_EVALUATES),
    "data.test_paths": (*_FILES, Choice("eval.test")),
    "data.valid_sets": (*_INDEXED, *_EVALUATES),
    "data.split": (Choice("data.paths"),),
    "data.eod_token": _DOCUMENTS_END,
    "data.fim_rate": _INDEXED,
    "data.fim_spm_rate": _FIM,
    "data.fim_tokens": _FIM,
    "data.chat_template": _CHAT,
    "data.packing": _CHAT,
    "data.overlong": _CHAT,
    "data.cache_dir": _INDEXED,
    "data.prefetch": (Choice("data.num_threads", others=(Choice("data.num_workers"),)),),
    "optimizer.options": (Choice("optimizer.name", (OWN,)),),
    "optimizer.min_lr": _LR_DECAYS,
    "optimizer.lr_decay_steps": _LR_DECAYS,
    "optimizer.lr_warmup_init": (Choice("optimizer.lr_warmup_steps"),),
    "optimizer.lr_wsd_decay_style": (Choice("optimizer.lr_decay_style", ("WSD",)),),
    "optimizer.lr_wsd_decay_steps": (Choice("optimizer.lr_decay_style", ("WSD",)),),
    "optimizer.decoupled_min_lr": (Choice("optimizer.decoupled_lr"),),
    "optimizer.weight_decay": (Choice("optimizer.weight_decay_incr_style", ("constant",)),),
    "optimizer.weight_decay_incr_style": _BUILT_IN,
    "optimizer.start_weight_decay": _WEIGHT_DECAY_GROWS,
    "optimizer.end_weight_decay": _WEIGHT_DECAY_GROWS,
    "optimizer.apply_wd_to_qk_layernorm": (
        Choice("model.qk_layernorm", others=(Choice("model.q_lora_rank"),)),
        _WEIGHTS_DECAY,
    ),
    "optimizer.adam_beta1": _ADAM,
    "optimizer.adam_beta2": _ADAM,
    "optimizer.adam_eps": _ADAM,
    "optimizer.exp_avg_dtype": (Choice("optimizer.name", ("adamw",)),),
    "optimizer.sgd_momentum": _SGD,
    "optimizer.lion_beta1": _LION,
    "optimizer.lion_beta2": _LION,
    "optimizer.adafactor_decay_rate": _ADAFACTOR,
    "optimizer.adafactor_clip_threshold": _ADAFACTOR,
    "optimizer.adafactor_scale_parameter": _ADAFACTOR,
    "optimizer.adafactor_min_dim_size_to_factor": _ADAFACTOR,
    "optimizer.muon_momentum": _MUON,
    "optimizer.muon_nesterov": _MUON,
    "optimizer.muon_scale_mode": _MUON,
    "optimizer.muon_extra_scale_factor": _MUON,
    "optimizer.muon_num_ns_steps": _MUON,
    "optimizer.muon_coefficient_type": _MUON,
    "optimizer.muon_fp32_matmul_prec": _MUON,
    "precision.fp8_backend": _FP8,
    "precision.fp8_format": _FP8,
    "precision.fp8_exceptions": _FP8,
    "precision.fp8_experts": (*_FP8, *_EXPERTS),
    "precision.first_last_layers_bf16": _FP8,
    "precision.num_layers_at_start_in_bf16": _FP8_ENDS,
    "precision.num_layers_at_end_in_bf16": _FP8_ENDS,
    "precision.fp8_amax_scope": _FP8,
    "precision.fp8_amax_history_len": _FP8_DELAYED,
    "precision.fp8_amax_compute_algo": _FP8_DELAYED,
    "precision.loss_scale": _FP16,
    "precision.initial_loss_scale": _MOVING_SCALE,
    "precision.min_loss_scale": _MOVING_SCALE,
    "precision.loss_scale_window": _MOVING_SCALE,
    "precision.hysteresis": _MOVING_SCALE,
    "checkpoint.interval": _SAVES,
    "checkpoint.keep": _SAVES,
    "checkpoint.save_retain_interval": (*_SAVES, Choice("checkpoint.keep")),
    "checkpoint.no_save_optim": _SAVES,
    "checkpoint.timeout_s": _SAVES,
    "checkpoint.load_step": _LOADS,
    "checkpoint.no_load_optim": (*_LOADS, _NOT_UPCYCLED, Choice("checkpoint.finetune", (False,))),
    "checkpoint.finetune": (*_LOADS, _NOT_UPCYCLED),
    "checkpoint.moe_use_upcycling": (*_LOADS, *_EXPERTS),
    "eval.interval": (_EVALUATES_SOMETHING,),
    "eval.iters": (Choice("eval.interval"), Choice("eval.full_validation", (False,))),
    "eval.full_validation": (Choice("eval.interval"),),
    "eval.test": _EVALUATES,
    "observe.profile_steps": (Choice("observe.dir"),),
    "runtime.gpu_memory_fraction": _ON_GPUS,
    "runtime.local_device_ids": _ON_GPUS,
}
"""Key -> the choices that all must hold for it to be read."""


def value_of(values: Values, key: str) -> Any:
    """The value of ``section.key``; its default where a configuration of old does not have it."""
    section, name = key.split(".")
    return values.get(section, {}).get(name, keys()[key].default)


def is_read(values: Values, key: str) -> bool:
    """Whether a training run with this configuration reads the key."""
    return all(choice.holds(values) for choice in READ_UNDER.get(key, ()))


def check_reads(config: Config) -> None:
    """Refuse values that say something, but that nothing would read under the other choices.

    Raises:
        ConfigError: every such key, its value, the choice that leaves it unread and what is right.
    """
    if problems := list(unread(config)):
        raise ConfigError("\n".join(problems))


def unread(config: Config, sections: Collection[str] | None = None) -> Iterator[str]:
    """What is wrong with each value that nothing would read, and what would be right.

    Args:
        config: of a training run.
        sections: of the keys; None: all.
    """
    values = to_dict(config)
    for key, choices in READ_UNDER.items():
        value, default = value_of(values, key), keys()[key].default
        if value == default or not (sections is None or keys()[key].section in sections):
            continue
        for choice in choices:
            if not choice.holds(values):
                why = choice.reason(values, key)
                yield (
                    f"{key} is {_shown(value)}, but {why}, under which nothing "
                    f"reads it: {choice.remedy}, or leave {key} at {_shown(default)}"
                )
                break


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else spelled(value)
