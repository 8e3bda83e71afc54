"""Learning rate as a function of the number of finished optimizer steps.

The formulas are those of Megatron's ``OptimizerParamScheduler``, counted in steps instead of
samples. Update ``i`` (from 0) uses ``lr(i)``: the first step of a run with warm-up uses
``lr_warmup_init``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtron.errors import ConfigError
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.decoupled_lr import decoupled_config

Schedule = Callable[[jax.Array | int], jax.Array]


def learning_rate_schedule(
    config: OptimizerConfig, *, total_steps: int, position: Schedule | None = None
) -> Schedule:
    """``lr(n)``: int32 count of finished steps -> float32 learning rate; usable under ``jit``.

    ``position`` maps the count to the place in the plan (steps, fp32), where batches differ in
    size; default: the count itself.

    With W warm-up steps and D decay steps (``lr_decay_steps``, else ``total_steps``):

    - ``n <= W`` (W > 0): from ``lr_warmup_init`` linearly to ``lr``.
    - ``constant``: ``lr`` from there on.
    - ``n > D``: ``min_lr``.
    - ``inverse-square-root``: ``max(min_lr, lr * sqrt(max(W, 1) / max(n, 1)))``.
    - otherwise ``min_lr + c * (lr - min_lr)``; with ``r = (n - W) / (D - W)`` the coefficient c is
      ``1 - r`` (linear) or ``(cos(pi r) + 1) / 2`` (cosine). WSD: 1 until the last
      ``lr_wsd_decay_steps`` steps, then with x in [0, 1] over these ``1 - x`` (linear),
      ``(cos(pi x) + 1) / 2`` (cosine), ``2 * 0.5**x - 1`` (exponential), ``1 - sqrt(x)``
      (minus_sqrt).

    Raises:
        ConfigError: a plan that contradicts itself.
    """
    check_schedule(config, total_steps=total_steps)
    warmup = config.lr_warmup_steps
    decay = config.lr_decay_steps or total_steps

    def schedule(count: jax.Array | int) -> jax.Array:
        n = jnp.asarray(count if position is None else position(count)).astype(jnp.float32)
        if config.lr_decay_style == "constant":
            lr = jnp.full_like(n, config.lr)
        else:
            lr = jnp.where(n > decay, config.min_lr, _decayed(config, n, warmup, decay))
        if warmup > 0:
            warming = _between(config.lr_warmup_init, config.lr, n / warmup)
            lr = jnp.where(n <= warmup, warming, lr)
        return lr

    return schedule


def check_schedule(config: OptimizerConfig, *, total_steps: int) -> None:
    """Refuse a learning-rate plan that contradicts itself.

    Raises:
        ConfigError: with the keys, their values and what would be right.
    """
    decoupled_config(config)
    if config.min_lr > config.lr:
        raise ConfigError(
            f"optimizer.min_lr={config.min_lr} is larger than optimizer.lr={config.lr}"
        )
    if config.lr_warmup_init > config.lr:
        raise ConfigError(
            f"optimizer.lr_warmup_init={config.lr_warmup_init} is larger than "
            f"optimizer.lr={config.lr}"
        )
    wsd = config.lr_decay_style == "WSD"
    if wsd and config.lr_wsd_decay_steps is None:
        raise ConfigError(
            "optimizer.lr_decay_style=WSD needs optimizer.lr_wsd_decay_steps, the length of its "
            "final decay"
        )
    if not wsd and config.lr_wsd_decay_steps is not None:
        raise ConfigError(
            f"optimizer.lr_wsd_decay_steps={config.lr_wsd_decay_steps} has no meaning with "
            f"optimizer.lr_decay_style={config.lr_decay_style}; set it to null or the style to WSD"
        )
    if config.lr_decay_style == "constant":
        return
    decay = config.lr_decay_steps or total_steps
    source = "optimizer.lr_decay_steps" if config.lr_decay_steps else "train.steps"
    if decay > 0 and config.lr_warmup_steps >= decay:
        raise ConfigError(
            f"optimizer.lr_warmup_steps={config.lr_warmup_steps} must be less than the steps of "
            f"the decay, {decay} ({source}); shorten the warm-up or set optimizer.lr_decay_steps"
        )
    final = config.lr_wsd_decay_steps
    if decay > 0 and final is not None and final > decay - config.lr_warmup_steps:
        raise ConfigError(
            f"optimizer.lr_wsd_decay_steps={final} is longer than the {decay} steps of the decay "
            f"({source}) less optimizer.lr_warmup_steps={config.lr_warmup_steps}"
        )


def _decayed(config: OptimizerConfig, n: jax.Array, warmup: int, decay: int) -> jax.Array:
    """Learning rate between the end of the warm-up and the end of the decay."""
    if config.lr_decay_style == "inverse-square-root":
        lr = config.lr * jnp.sqrt(max(warmup, 1) / jnp.maximum(n, 1.0))
        return jnp.maximum(lr, config.min_lr)
    if config.lr_decay_style == "WSD":
        length = config.lr_wsd_decay_steps or 1
        progress = jnp.clip((n - (decay - length)) / length, 0.0, 1.0)
        coefficient = _COEFFICIENTS[config.lr_wsd_decay_style](progress)
    else:
        progress = jnp.clip((n - warmup) / max(decay - warmup, 1), 0.0, 1.0)
        coefficient = _COEFFICIENTS[config.lr_decay_style](progress)
    return _between(config.min_lr, config.lr, coefficient)


def _between(start: float, end: float, share: jax.Array) -> jax.Array:
    """Linear interpolation that is exact at both ends."""
    return start * (1.0 - share) + end * share


_COEFFICIENTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (jnp.cos(jnp.pi * x) + 1.0),
    "exponential": lambda x: 2.0 * jnp.exp2(-x) - 1.0,
    "minus_sqrt": lambda x: 1.0 - jnp.sqrt(x),
}
