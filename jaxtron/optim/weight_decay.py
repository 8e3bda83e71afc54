"""Weight decay that changes during the run."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtron.errors import ConfigError
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.schedule import Schedule


def weight_decay_schedule(
    config: OptimizerConfig, *, total_steps: int, position: Schedule | None = None
) -> float | Schedule:
    """``weight_decay`` or, with a style other than ``constant``, a function of finished steps.

    As Megatron's ``OptimizerParamScheduler``: ``start + c * (end - start)`` with ``r = n / N`` of
    the ``N`` steps of the run, ``c = r`` (linear) or ``(cos(pi (1 - r)) + 1) / 2`` (cosine), and
    ``end`` after them. ``position`` is as in ``learning_rate_schedule``.

    Raises:
        ConfigError: as :func:`check_weight_decay`.
    """
    check_weight_decay(config)
    start, end = config.start_weight_decay, config.end_weight_decay
    if start is None or end is None:
        return config.weight_decay

    def schedule(count: jax.Array | int) -> jax.Array:
        n = jnp.asarray(count if position is None else position(count)).astype(jnp.float32)
        progress = n / max(total_steps, 1)
        progress = jnp.minimum(progress, 1.0)
        if config.weight_decay_incr_style == "cosine":
            progress = 0.5 * (jnp.cos(jnp.pi * (1.0 - progress)) + 1.0)
        return start * (1.0 - progress) + end * progress

    return schedule


def check_weight_decay(config: OptimizerConfig) -> None:
    """Refuse keys of the weight decay that contradict each other.

    Raises:
        ConfigError: with the keys, their values and what would be right.
    """
    style = config.weight_decay_incr_style
    ends = {
        "start_weight_decay": config.start_weight_decay,
        "end_weight_decay": config.end_weight_decay,
    }
    if style == "constant":
        given = [f"optimizer.{name}={value}" for name, value in ends.items() if value is not None]
        if given:
            raise ConfigError(
                f"{' and '.join(given)} without a change of the decay: set "
                "optimizer.weight_decay_incr_style to linear or cosine, or use "
                "optimizer.weight_decay alone"
            )
        return
    missing = [f"optimizer.{name}" for name, value in ends.items() if value is None]
    if missing:
        raise ConfigError(
            f"optimizer.weight_decay_incr_style={style} needs {' and '.join(missing)}"
        )
    start, end = config.start_weight_decay, config.end_weight_decay
    if start is not None and end is not None and end < start:
        raise ConfigError(
            f"optimizer.end_weight_decay={end} is less than optimizer.start_weight_decay={start}: "
            "the decay only grows"
        )


def add_scheduled_decay(schedule: Schedule) -> optax.GradientTransformation:
    """Add ``schedule(count) * parameter`` to the updates.

    The state is optax's state of a schedule, so that whoever restores a run without its optimizer
    state finds the count and sets it.
    """

    def init(params: Any) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(updates: Any, state: optax.ScaleByScheduleState, params: Any = None) -> Any:
        decay = schedule(state.count)
        updates = jax.tree.map(lambda u, p: u + decay * p, updates, params)
        return updates, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)
