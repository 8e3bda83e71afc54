"""Gradient descent with momentum."""

import jax.numpy as jnp
import optax

from jaxtron.optim.plan import Plan


def sgd(plan: Plan) -> optax.GradientTransformation:
    """Gradient descent with momentum and an L2 term in the gradient, as in ``torch.optim.SGD``."""
    momentum = plan.config.sgd_momentum
    return optax.chain(
        plan.decay(),
        *([optax.trace(momentum, accumulator_dtype=jnp.float32)] if momentum > 0 else []),
        plan.descend(),
    )
