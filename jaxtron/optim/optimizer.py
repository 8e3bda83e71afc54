"""Optimizers by name, built from optax.

An optimizer from another package is named by ``optimizer.name: "module:factory"``. The factory is
called as ``factory(config, schedule, decay_mask, **config.options)`` and returns an
``optax.GradientTransformation``::

    def lion(config, schedule, decay_mask, *, b1=0.9):
        return optax.lion(schedule, b1=b1, weight_decay=config.weight_decay, mask=decay_mask)

``schedule`` maps a count of updates to the learning rate (:mod:`jaxtron.optim.schedule`) and
``decay_mask`` is true for parameters that weight decay applies to. The state must be a tree of
arrays, in which what belongs to the parameters lies in trees like the parameters'.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from jaxtron.errors import ConfigError
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.decay_mask import decay_mask
from jaxtron.optim.schedule import Schedule, learning_rate_schedule

OptimizerFactory = Callable[..., optax.GradientTransformation]
"""What stands behind an optimizer's name: ``(config, schedule, decay_mask, **options)``."""


def make_optimizer(
    config: OptimizerConfig, *, total_steps: int, logical_axes: Any
) -> optax.GradientTransformation:
    """The update rule that ``optimizer.name`` asks for; clipping is done before it.

    Args:
        config: the section ``optimizer``.
        total_steps: ``train.steps``, the default length of the learning-rate decay.
        logical_axes: a tree like the parameters, whose leaves are tuples of logical axis names.

    Returns:
        A transformation whose state holds float32 moments in trees like the parameters and int32
        counts of updates.

    Raises:
        ConfigError: unknown name, a factory that cannot be imported, or a bad learning-rate plan.
    """
    factory = find_factory(config)
    schedule = learning_rate_schedule(config, total_steps=total_steps)
    return factory(config, schedule, decay_mask(logical_axes), **config.options)


def find_factory(config: OptimizerConfig) -> OptimizerFactory:
    """The factory behind ``optimizer.name``.

    Raises:
        ConfigError: no such optimizer, or options for a built-in one.
    """
    name = config.name
    if name in OPTIMIZERS:
        if config.options:
            raise ConfigError(
                f"optimizer.options has {', '.join(config.options)}, but optimizer.name={name} "
                "takes none; they are for module:factory optimizers"
            )
        return OPTIMIZERS[name]
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(
            f"optimizer.name is {name!r}; it must be one of {', '.join(OPTIMIZERS)} or "
            "module:factory"
        )
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"optimizer.name={name} cannot be imported: {error}") from error
    if not callable(factory):
        raise ConfigError(f"optimizer.name={name} is a {type(factory).__name__}, not a function")
    return factory


def adamw(
    config: OptimizerConfig, schedule: Schedule, decay_mask: Any
) -> optax.GradientTransformation:
    """Adam with decoupled decay that is multiplied by the learning rate.

    Loshchilov and Hutter 2019, arXiv:1711.05101, as in ``torch.optim.AdamW``.
    """
    return optax.chain(
        optax.scale_by_adam(
            b1=config.adam_beta1, b2=config.adam_beta2, eps=config.adam_eps, mu_dtype=jnp.float32
        ),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(schedule),
    )


def sgd(
    config: OptimizerConfig, schedule: Schedule, decay_mask: Any
) -> optax.GradientTransformation:
    """Gradient descent with momentum and an L2 term in the gradient, as in ``torch.optim.SGD``."""
    momentum = optax.trace(config.sgd_momentum, accumulator_dtype=jnp.float32)
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        *([momentum] if config.sgd_momentum > 0 else []),
        optax.scale_by_learning_rate(schedule),
    )


OPTIMIZERS: dict[str, OptimizerFactory] = {"adamw": adamw, "sgd": sgd}
"""Built-in optimizers by name."""
