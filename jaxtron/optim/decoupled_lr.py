"""Another learning rate for the embedding and the output layer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxtron.errors import ConfigError
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.matrices import is_axes

Build = Callable[[OptimizerConfig, Any], optax.GradientTransformation]
"""``(config, logical_axes) -> optimizer`` of the parameters that the tree of axes holds."""


def with_decoupled_lr(
    config: OptimizerConfig, logical_axes: Any, build: Build
) -> optax.GradientTransformation:
    """One optimizer, or with ``decoupled_lr`` one for each of the two groups of parameters.

    Word embedding and output layer (parameters with a ``vocab`` axis) then follow the same plan
    with ``decoupled_lr`` and ``decoupled_min_lr`` for its largest and smallest learning rate.
    """
    decoupled = decoupled_config(config)
    if decoupled is None:
        return build(config, logical_axes)
    labels = jax.tree.map(
        lambda axes: "decoupled" if "vocab" in axes else "others", logical_axes, is_leaf=is_axes
    )

    def only(label: str) -> Any:
        return jax.tree.map(
            lambda axes, own: axes if own == label else optax.MaskedNode(),
            logical_axes,
            labels,
            is_leaf=is_axes,
        )

    groups = {
        "decoupled": build(decoupled, only("decoupled")),
        "others": build(config, only("others")),
    }
    return optax.partition(groups, labels)


def decoupled_config(config: OptimizerConfig) -> OptimizerConfig | None:
    """The section with the decoupled learning rates in place of the others; None without them.

    Raises:
        ConfigError: a plan that contradicts itself.
    """
    lr, min_lr = config.decoupled_lr, config.decoupled_min_lr
    if lr is None:
        if min_lr is not None:
            raise ConfigError(
                f"optimizer.decoupled_min_lr={min_lr} without optimizer.decoupled_lr; set both or "
                "neither"
            )
        return None
    name = "decoupled_min_lr"
    if min_lr is None:
        name, min_lr = "min_lr", config.min_lr
    if min_lr > lr:
        raise ConfigError(
            f"optimizer.{name}={min_lr} is larger than optimizer.decoupled_lr={lr}"
            + ("" if name == "decoupled_min_lr" else "; set optimizer.decoupled_min_lr")
        )
    if config.lr_warmup_init > lr:
        raise ConfigError(
            f"optimizer.lr_warmup_init={config.lr_warmup_init} is larger than "
            f"optimizer.decoupled_lr={lr}"
        )
    return dataclasses.replace(
        config, lr=lr, min_lr=min_lr, decoupled_lr=None, decoupled_min_lr=None
    )
