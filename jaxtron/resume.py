"""What a checkpoint and the configuration that resumes it must agree on."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxtron.config.config import Config
from jaxtron.config.dump import to_dict
from jaxtron.config.reads import is_read, value_of
from jaxtron.errors import CheckpointError
from jaxtron.layers.moe.expert_bias import split_buffers
from jaxtron.program import Program
from jaxtron.state_plan import State

log = logging.getLogger(__name__)

# Keys that may differ between the run that saved and the run that goes on: they say how something
# is computed, or what training adds, drops and disturbs, which recipes change on the way
# (DeepSeek-V3's bias stands still at the end, its weight of further tokens falls). None of them
# changes which samples come next, or what weights compute for a token that nothing is taken from.
_FREE_MODEL_KEYS = {
    "attention_backend",
    "attention_dropout",
    "gated_mlp_backend",
    "hidden_dropout",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm_backend",
    "moe_per_layer_logging",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "moe_router_bias_update_rate",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "mtp_loss_scaling_factor",
}
_ORDER_KEYS = (
    "train.seed",
    "train.global_batch_size",
    "train.rampup_batch_size",
    "data.source",
    "data.source_options",
    "data.seq_length",
    "data.paths",
    "data.train_paths",
    "data.split",
    "data.dataloader_type",
    "data.fim_rate",
    "data.fim_spm_rate",
    "data.fim_tokens",
    "data.chat_template",
    "data.packing",
    "data.overlong",
)
_PATH_KEYS = ("data.paths", "data.train_paths")
_LR_PLAN_KEYS = (
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.lr_decay_style",
    "optimizer.lr_decay_steps",
    "optimizer.lr_warmup_steps",
    "optimizer.lr_warmup_init",
    "optimizer.lr_wsd_decay_style",
    "optimizer.lr_wsd_decay_steps",
    "optimizer.decoupled_lr",
    "optimizer.decoupled_min_lr",
    "optimizer.weight_decay_incr_style",
    "optimizer.start_weight_decay",
    "optimizer.end_weight_decay",
)


def run_meta(
    config: Config,
    consumed_samples: int,
    data_order: int | None = None,
    data_files: list[int] | None = None,
) -> dict[str, Any]:
    """What a checkpoint records beside the arrays.

    ``data_order`` and ``data_files`` are from ``order_digest`` and ``file_fingerprints`` in
    :mod:`jaxtron.data.order`.
    """
    return {
        "consumed_samples": consumed_samples,
        "data_order": data_order,
        "data_files": data_files,
        "config": to_dict(config),
    }


def consumed_samples(meta: Mapping[str, Any], where: str) -> int:
    """Samples that the run had read when it saved.

    Raises:
        CheckpointError: the checkpoint does not say.
    """
    if "consumed_samples" not in meta:
        raise CheckpointError(_no_record(where, "the position in the data"))
    return int(meta["consumed_samples"])


def with_fresh_optimizer(program: Program, restored: State) -> State:
    """Complete a state of which ``params``, and ``step`` and ``updates`` or not, were restored.

    Without them the run starts at step 0. The optimizer has seen nothing, but the learning-rate
    plan goes on from the restored number of updates. Loss scale and FP8 scales are the first ones,
    unless they were restored.
    """

    def init(params: Any, step: jax.Array, updates: jax.Array) -> State:
        def place(state: Any) -> Any:
            follows = isinstance(state, optax.ScaleByScheduleState)
            return state._replace(count=updates) if follows else state

        opt_state = jax.tree.map(
            place,
            program.optimizer.init(split_buffers(params)[0]),
            is_leaf=lambda state: isinstance(state, optax.ScaleByScheduleState),
        )
        return {"opt_state": opt_state, "step": step, "updates": updates}

    restored = with_scales(program, restored)
    counts = [restored.get(name, np.int32(0)) for name in ("step", "updates")]
    fresh = {name: program.state_shardings[name] for name in ("opt_state", "step", "updates")}
    return {**jax.jit(init, out_shardings=fresh)(restored["params"], *counts), **restored}


SCALES = ("loss_scale", "fp8")
"""Entries of a state that a run has or has not, by its precision."""


def with_scales(program: Program, restored: State) -> State:
    """Complete a state of a run of another precision: fp16 without, delayed FP8 scaling without."""
    missing = [name for name in SCALES if name in program.state_shardings and name not in restored]
    if not missing:
        return restored
    log.info("no %s to go on with: it starts as in a new run", ", ".join(missing))
    shardings = {name: program.state_shardings[name] for name in missing}

    def init() -> State:
        return {name: program.init_scales()[name] for name in missing}

    return {**restored, **jax.jit(init, out_shardings=shardings)()}


def _no_record(where: str, what: str) -> str:
    return (
        f"{where} does not record {what}: it was not saved by a training run of jaxtron; take its "
        "weights alone with checkpoint.finetune=true"
    )


def _differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, ...]
) -> list[str]:
    return [
        f"{name}: {value_of(saved, name)!r} in the checkpoint, {value_of(now, name)!r} now"
        for name in names
        if value_of(saved, name) != value_of(now, name)
        and (is_read(saved, name) or is_read(now, name))
    ]


def check_architecture(config: Config, meta: Mapping[str, Any], where: str) -> None:
    """Refuse weights of a model that computes something else.

    Raises:
        CheckpointError: the model section differs; every differing key is listed.
    """
    if "config" not in meta:
        log.warning("%s does not record its configuration: only array shapes are compared", where)
        return
    saved, now = meta["config"], to_dict(config)
    free = set(_FREE_MODEL_KEYS)
    balancing = "model.moe_router_load_balancing_type"
    if "sinkhorn" not in (value_of(saved, balancing), value_of(now, balancing)):
        free.add("moe_router_load_balancing_type")  # a loss; sinkhorn chooses experts
    names = tuple(f"model.{k}" for k in now["model"] if k not in free)
    if problems := _differences(saved, now, names):
        way = ""
        if config.model.num_experts and not value_of(saved, "model.num_experts"):
            way = (
                "\na model with experts starts from the weights of a dense one with "
                "checkpoint.load=... checkpoint.moe_use_upcycling=true and another checkpoint.dir"
            )
        raise CheckpointError(
            f"{where} holds another model than the configuration describes:\n  "
            + "\n  ".join(problems)
            + way
        )


def _moved(saved: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    """Whether two lists of paths and weights differ in the paths alone."""

    def moved(old: Any, new: Any) -> bool:
        if isinstance(old, list) and isinstance(new, list):
            return len(old) == len(new) and all(map(moved, old, new))
        return old == new or (isinstance(old, str) and isinstance(new, str))

    return moved(value_of(saved, key), value_of(now, key))


def check_continuation(
    config: Config, meta: Mapping[str, Any], where: str, data_files: list[int] | None = None
) -> None:
    """Refuse to go on with another data order or, unasked, another learning-rate plan.

    Files may lie elsewhere than they did: paths that differ are accepted when ``data_files``, their
    fingerprints, are those that the checkpoint records.

    Raises:
        CheckpointError: every differing key is listed, with the ways to proceed.
    """
    if "config" not in meta:
        raise CheckpointError(_no_record(where, "the configuration of its run"))
    saved, now = meta["config"], to_dict(config)
    same_files = data_files is not None and meta.get("data_files") == data_files
    names = tuple(
        name
        for name in _ORDER_KEYS
        if not (name in _PATH_KEYS and same_files and _moved(saved, now, name))
    )
    if moved := _differences(saved, now, tuple(n for n in _ORDER_KEYS if n not in names)):
        log.info("the data has moved, its contents are the same:\n  %s", "\n  ".join(moved))
    if problems := _differences(saved, now, names):
        raise CheckpointError(
            f"going on from {where} would read other samples than the run it continues:\n  "
            + "\n  ".join(problems)
            + "\nrestore these keys, or start a new run from the weights with checkpoint.load=... "
            "checkpoint.finetune=true and another checkpoint.dir"
        )
    names = _LR_PLAN_KEYS
    decays = config.optimizer.lr_decay_style != "constant"
    if decays and config.optimizer.lr_decay_steps is None:
        names = (*names, "train.steps")
    problems = _differences(saved, now, names)
    if problems and not config.optimizer.override_opt_param_scheduler:
        raise CheckpointError(
            f"going on from {where} with another learning-rate plan:\n  "
            + "\n  ".join(problems)
            + "\nset optimizer.override_opt_param_scheduler=true to use the new plan from here on"
        )
