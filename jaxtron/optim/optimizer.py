"""Optimizers by name, built from optax.

``adamw`` (:mod:`jaxtron.optim.adam`), ``sgd``, ``lion``, ``adafactor`` and ``muon`` each have a
module of their name.

An optimizer from another package is named by ``optimizer.name: "module:factory"``. The factory is
called as ``factory(config, schedule, decay_mask, **config.options)`` and returns an
``optax.GradientTransformation``::

    def lamb(config, schedule, decay_mask, *, b1=0.9):
        return optax.lamb(schedule, b1=b1, weight_decay=config.weight_decay, mask=decay_mask)

``schedule`` maps a count of updates to the learning rate (:mod:`jaxtron.optim.schedule`) and
``decay_mask`` is true for parameters that weight decay applies to. A weight decay that grows is not
handed over, so ``weight_decay_incr_style`` is refused. The state must be a tree of arrays, in which
what belongs to the parameters lies in trees like the parameters'. With
``decoupled_lr`` it is called once for each of the two groups of parameters, with trees that hold
``optax.MaskedNode()`` in place of the parameters of the other.
"""

from collections.abc import Callable
from typing import Any

import optax

from jaxtron.errors import ConfigError
from jaxtron.optim.adafactor import adafactor
from jaxtron.optim.adam import adamw
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.decay_mask import decay_mask
from jaxtron.optim.decoupled_lr import decoupled_config, with_decoupled_lr
from jaxtron.optim.lion import lion
from jaxtron.optim.muon import check_muon, muon
from jaxtron.optim.plan import Plan
from jaxtron.optim.schedule import Schedule, learning_rate_schedule
from jaxtron.optim.sgd import sgd
from jaxtron.optim.weight_decay import check_weight_decay, weight_decay_schedule
from jaxtron.plugins import import_function

OptimizerFactory = Callable[[Plan], optax.GradientTransformation]
"""What stands behind an optimizer's name."""

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": adamw,
    "sgd": sgd,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
}
"""Built-in optimizers by name."""

ROWS_APART = ("adamw", "sgd", "lion", "muon")
"""Those that update the rows of embedding and output layer independently of each other."""


def make_optimizer(
    config: OptimizerConfig,
    *,
    total_steps: int,
    logical_axes: Any,
    position: Schedule | None = None,
) -> optax.GradientTransformation:
    """The update rule that ``optimizer.name`` asks for; clipping is done before it.

    Args:
        config: the section ``optimizer``.
        total_steps: ``train.steps``, the default length of the learning-rate decay.
        logical_axes: a tree like the parameters, whose leaves are tuples of logical axis names.
        position: place in the plans by count of updates; default: the count.

    Returns:
        A transformation whose state holds moments in trees like the parameters and int32 counts of
        updates. Moments are float32 unless a key says otherwise.

    Raises:
        ConfigError: unknown name, a factory that cannot be imported, or a bad plan of learning rate
            or weight decay.
    """
    factory = find_factory(config)

    def build(config: OptimizerConfig, logical_axes: Any) -> optax.GradientTransformation:
        return factory(
            Plan(
                config=config,
                learning_rate=learning_rate_schedule(
                    config, total_steps=total_steps, position=position
                ),
                weight_decay=weight_decay_schedule(
                    config, total_steps=total_steps, position=position
                ),
                decay_mask=decay_mask(logical_axes, qk_layernorm=config.apply_wd_to_qk_layernorm),
                logical_axes=logical_axes,
            )
        )

    return with_decoupled_lr(config, logical_axes, build)


def plan_rates(
    config: OptimizerConfig, *, total_steps: int, position: Schedule | None = None
) -> dict[str, Schedule]:
    """What the plans give, by its name in the metrics, as functions of the count of updates.

    ``lr`` always; ``decoupled_lr`` and ``weight_decay`` where the configuration has a plan of them.
    """
    rates = {"lr": learning_rate_schedule(config, total_steps=total_steps, position=position)}
    decoupled = decoupled_config(config)
    if decoupled is not None:
        rates["decoupled_lr"] = learning_rate_schedule(
            decoupled, total_steps=total_steps, position=position
        )
    decay = weight_decay_schedule(config, total_steps=total_steps, position=position)
    if callable(decay):
        rates["weight_decay"] = decay
    return rates


def find_factory(config: OptimizerConfig) -> OptimizerFactory:
    """The factory behind ``optimizer.name``.

    Raises:
        ConfigError: no such optimizer, options for a built-in one, or keys that contradict it.
    """
    check_weight_decay(config)
    if config.name == "muon":
        check_muon(config)
    if config.exp_avg_dtype != "fp32" and config.name != "adamw":
        raise ConfigError(
            f"optimizer.exp_avg_dtype={config.exp_avg_dtype} is for optimizer.name=adamw, not "
            f"{config.name}; set it to fp32"
        )
    if config.offload and config.name == "sgd" and not config.sgd_momentum:
        raise ConfigError(
            "optimizer.offload keeps moments on the host, but optimizer.name=sgd has none with "
            "optimizer.sgd_momentum=0: set optimizer.offload to false"
        )
    name = config.name
    if name in OPTIMIZERS:
        if config.options:
            raise ConfigError(
                f"optimizer.options has {', '.join(config.options)}, but optimizer.name={name} "
                "takes none; they are for module:factory optimizers"
            )
        return OPTIMIZERS[name]
    factory = import_function("optimizer.name", name, OPTIMIZERS)

    def from_plan(plan: Plan) -> optax.GradientTransformation:
        return factory(plan.config, plan.learning_rate, plan.decay_mask, **plan.config.options)

    return from_plan
