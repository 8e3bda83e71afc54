"""What a checkpoint and the configuration that resumes it must agree on."""

from collections.abc import Mapping
from typing import Any

from jaxtron.config.config import Config
from jaxtron.config.dump import to_dict
from jaxtron.errors import CheckpointError

# Keys that may differ between the run that saved and the run that goes on: they change neither the
# function that the weights compute nor which samples come next.
_FREE_MODEL_KEYS = {"attention_backend", "attention_dropout", "hidden_dropout"}
_ORDER_KEYS = (
    "train.seed",
    "train.global_batch_size",
    "data.source",
    "data.seq_length",
    "data.paths",
    "data.train_paths",
    "data.split",
    "data.dataloader_type",
)
_LR_PLAN_KEYS = (
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.lr_decay_style",
    "optimizer.lr_decay_steps",
    "optimizer.lr_warmup_steps",
)


def run_meta(config: Config, consumed_samples: int) -> dict[str, Any]:
    """What a checkpoint records beside the arrays."""
    return {"consumed_samples": consumed_samples, "config": to_dict(config)}


def _value(config: Mapping[str, Any], dotted: str) -> Any:
    section, name = dotted.split(".")
    return config.get(section, {}).get(name)


def _differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, ...]
) -> list[str]:
    return [
        f"{name}: {_value(saved, name)!r} in the checkpoint, {_value(now, name)!r} now"
        for name in names
        if _value(saved, name) != _value(now, name)
    ]


def check_architecture(config: Config, meta: Mapping[str, Any], where: str) -> None:
    """Refuse weights of a model that computes something else.

    Raises:
        CheckpointError: the model section differs; every differing key is listed.
    """
    saved, now = meta["config"], to_dict(config)
    names = tuple(f"model.{k}" for k in now["model"] if k not in _FREE_MODEL_KEYS)
    if problems := _differences(saved, now, names):
        raise CheckpointError(
            f"{where} holds another model than the configuration describes:\n  "
            + "\n  ".join(problems)
        )


def check_continuation(config: Config, meta: Mapping[str, Any], where: str) -> None:
    """Refuse to go on with another data order or, unasked, another learning-rate plan.

    Raises:
        CheckpointError: every differing key is listed, with the ways to proceed.
    """
    saved, now = meta["config"], to_dict(config)
    if problems := _differences(saved, now, _ORDER_KEYS):
        raise CheckpointError(
            f"going on from {where} would read other samples than the run it continues:\n  "
            + "\n  ".join(problems)
            + "\nrestore these keys, or start a new run from the weights with checkpoint.load=... "
            "checkpoint.finetune=true and another checkpoint.dir"
        )
    names: tuple[str, ...] = _LR_PLAN_KEYS
    if _value(now, "optimizer.lr_decay_steps") is None:
        names = (*names, "train.steps")
    problems = _differences(saved, now, names)
    if problems and not config.optimizer.override_opt_param_scheduler:
        raise CheckpointError(
            f"going on from {where} with another learning-rate plan:\n  "
            + "\n  ".join(problems)
            + "\nset optimizer.override_opt_param_scheduler=true to use the new plan from here on"
        )
