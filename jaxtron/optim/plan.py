"""What every built-in optimizer is made from."""

from dataclasses import dataclass
from typing import Any

import optax

from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.schedule import Schedule
from jaxtron.optim.weight_decay import add_scheduled_decay


@dataclass(frozen=True)
class Plan:
    """Settings of one group of parameters.

    Attributes:
        config: the section ``optimizer``.
        learning_rate: of this group, by count of updates.
        weight_decay: a constant, or a function of the count of updates.
        decay_mask: a tree like the parameters, true where weight decay applies.
        logical_axes: a tree like the parameters, whose leaves are tuples of logical axis names.
    """

    config: OptimizerConfig
    learning_rate: Schedule
    weight_decay: float | Schedule
    decay_mask: Any
    logical_axes: Any

    def decay(self) -> optax.GradientTransformation:
        """Add ``weight_decay * parameter`` where the mask is true."""
        if callable(self.weight_decay):
            return optax.masked(add_scheduled_decay(self.weight_decay), self.decay_mask)
        return optax.add_decayed_weights(self.weight_decay, mask=self.decay_mask)

    def descend(self) -> optax.GradientTransformation:
        """Multiply by minus the learning rate."""
        return optax.scale_by_learning_rate(self.learning_rate)
