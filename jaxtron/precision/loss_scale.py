"""Loss scaling for fp16: small gradients are multiplied out of fp16's underflow.

The rules are those of Megatron's ``DynamicGradScaler`` (after Micikevicius et al. 2018,
arXiv:1710.03740): a step whose gradients are not finite updates nothing; after ``hysteresis`` of
them since the last growth, each one more halves the scale; ``window`` finite steps in a row double
it and restore the hysteresis.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtron.precision.config import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5
ScaleState = dict[str, jax.Array]


@dataclass(frozen=True)
class LossScaler:
    """How the loss scale of a run moves.

    The state is a dict of scalars: ``scale`` (fp32), ``growth_tracker`` (finite steps in a row
    since the last change) and ``hysteresis_tracker`` (overflows left before the scale shrinks),
    int32.

    Attributes:
        initial: scale of the first step.
        minimum: the scale never falls below it.
        window: finite steps in a row after which the scale doubles; None: the scale is constant.
        hysteresis: overflows from which on the scale shrinks.
    """

    initial: float
    minimum: float = 1.0
    window: int | None = None
    hysteresis: int = 1

    def init(self) -> ScaleState:
        """The state before the first step."""
        return {
            "scale": jnp.float32(self.initial),
            "growth_tracker": jnp.int32(0),
            "hysteresis_tracker": jnp.int32(self.hysteresis),
        }

    def update(self, state: ScaleState, finite: jax.Array) -> ScaleState:
        """The state after a step whose gradients were all finite, or not."""
        if self.window is None:
            return state
        growth = jnp.where(finite, state["growth_tracker"] + 1, 0)
        left = state["hysteresis_tracker"] - jnp.where(finite, 0, 1)
        smaller = jnp.maximum(state["scale"] * BACKOFF, self.minimum)
        scale = jnp.where(~finite & (left <= 0), smaller, state["scale"])
        grows = growth == self.window
        return {
            "scale": jnp.where(grows, scale * GROWTH, scale),
            "growth_tracker": jnp.where(grows, 0, growth),
            "hysteresis_tracker": jnp.where(grows, self.hysteresis, left),
        }


def loss_scaler(config: PrecisionConfig) -> LossScaler | None:
    """The scaler of a run; None unless it computes in fp16."""
    if config.compute != "fp16":
        return None
    if config.loss_scale is not None:
        return LossScaler(config.loss_scale)
    return LossScaler(
        config.initial_loss_scale,
        config.min_loss_scale,
        config.loss_scale_window,
        config.hysteresis,
    )
