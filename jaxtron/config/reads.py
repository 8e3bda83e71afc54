"""Keys that only some choices read, and the refusal of values that nothing would read.

``READ_UNDER`` has the keys of a training run; combinations that matter to a model's shape, to
experts and to the layout are with their sections in ``validate_*``.
"""

import dataclasses
from collections.abc import Iterator, Mapping
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
    """

    key: str
    among: tuple[Any, ...] = ()

    def holds(self, values: Values) -> bool:
        """Whether the configuration makes this choice."""
        value = value_of(values, self.key)
        if not self.among:
            return value not in (None, False, 0, [], {})
        return value in self.among or (OWN in self.among and ":" in str(value))

    @property
    def remedy(self) -> str:
        """What makes the choice hold."""
        among = self.among or ((True,) if keys()[self.key].type is bool else ())
        return f"set {self.key}" + (f" to {' or '.join(map(_shown, among))}" if among else "")


_ADAM = (Choice("optimizer.name", ("adamw", "muon", OWN)),)
_SGD = (Choice("optimizer.name", ("sgd", OWN)),)
_LION = (Choice("optimizer.name", ("lion", OWN)),)
_ADAFACTOR = (Choice("optimizer.name", ("adafactor", OWN)),)
_MUON = (Choice("optimizer.name", ("muon", OWN)),)
_DECAY = (Choice("optimizer.lr_decay_style", ("linear", "cosine", "inverse-square-root", "WSD")),)
_FP16 = (Choice("precision.compute", ("fp16",)),)
_MOVING_SCALE = (*_FP16, Choice("precision.loss_scale", (None,)))
_FP8 = (Choice("precision.fp8"),)
_FP8_DELAYED = (Choice("precision.fp8", ("delayed",)),)
_FP8_ENDS = (*_FP8, Choice("precision.first_last_layers_bf16"))
_ROPE = (Choice("model.position_embedding_type", ("rope",)),)
_FILES = (Choice("data.source", ("indexed", "chat")),)
_INDEXED = (Choice("data.source", ("indexed",)),)
_CHAT = (Choice("data.source", ("chat",)),)
_FIM = (Choice("data.fim_rate"),)
_SAVES = (Choice("checkpoint.dir"),)
_EVALUATES = (Choice("eval.interval"),)

READ_UNDER: dict[str, tuple[Choice, ...]] = {
    "model.rotary_base": _ROPE,
    "model.rotary_percent": _ROPE,
    "parallel.reshard_after_forward": (Choice("parallel.data_sharding", ("optim_grads_params",)),),
    "data.source_options": (Choice("data.source", (OWN,)),),
    "data.paths": _FILES,
    "data.train_paths": _FILES,
    "data.valid_paths": _FILES,
    "data.test_paths": (*_FILES, Choice("eval.test")),
    "data.valid_sets": _INDEXED,
    "data.split": (Choice("data.paths"),),
    "data.fim_rate": _INDEXED,
    "data.fim_spm_rate": _FIM,
    "data.fim_tokens": _FIM,
    "data.chat_template": _CHAT,
    "data.packing": _CHAT,
    "data.overlong": _CHAT,
    "data.cache_dir": _INDEXED,
    "optimizer.options": (Choice("optimizer.name", (OWN,)),),
    "optimizer.min_lr": _DECAY,
    "optimizer.lr_decay_steps": _DECAY,
    "optimizer.lr_warmup_init": (Choice("optimizer.lr_warmup_steps"),),
    "optimizer.lr_wsd_decay_style": (Choice("optimizer.lr_decay_style", ("WSD",)),),
    "optimizer.lr_wsd_decay_steps": (Choice("optimizer.lr_decay_style", ("WSD",)),),
    "optimizer.decoupled_min_lr": (Choice("optimizer.decoupled_lr"),),
    "optimizer.weight_decay": (Choice("optimizer.weight_decay_incr_style", ("constant",)),),
    "optimizer.start_weight_decay": (
        Choice("optimizer.weight_decay_incr_style", ("linear", "cosine")),
    ),
    "optimizer.end_weight_decay": (
        Choice("optimizer.weight_decay_incr_style", ("linear", "cosine")),
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
    "precision.fp8_experts": _FP8,
    "precision.first_last_layers_bf16": _FP8,
    "precision.num_layers_at_start_in_bf16": _FP8_ENDS,
    "precision.num_layers_at_end_in_bf16": _FP8_ENDS,
    "precision.fp8_amax_scope": (Choice("precision.fp8", ("current",)),),
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
    "checkpoint.load_step": (Choice("checkpoint.load"),),
    "checkpoint.no_load_optim": (Choice("checkpoint.load"),),
    "checkpoint.finetune": (Choice("checkpoint.load"),),
    "checkpoint.moe_use_upcycling": (Choice("checkpoint.load"),),
    "eval.iters": _EVALUATES,
    "eval.full_validation": _EVALUATES,
    "eval.test": _EVALUATES,
    "observe.profile_steps": (Choice("observe.dir"),),
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
    if problems := list(_unread(to_dict(config))):
        raise ConfigError("\n".join(problems))


def _unread(values: Values) -> Iterator[str]:
    for key, choices in READ_UNDER.items():
        value, default = value_of(values, key), keys()[key].default
        if value == default:
            continue
        for choice in choices:
            if not choice.holds(values):
                yield (
                    f"{key} is {_shown(value)}, but {choice.key} is "
                    f"{_shown(value_of(values, choice.key))}, under which nothing reads it: "
                    f"{choice.remedy}, or leave {key} at {_shown(default)}"
                )
                break


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else spelled(value)
