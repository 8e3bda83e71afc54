"""Lion: the sign of a momentum."""

import jax.numpy as jnp
import optax

from jaxtron.optim.plan import Plan


def lion(plan: Plan) -> optax.GradientTransformation:
    """Steps of equal size in every direction: ``sign(beta1 * m + (1 - beta1) * g)``.

    ``m`` decays with ``lion_beta2``; weight decay is decoupled and multiplied by the learning rate.
    Chen et al. 2023, arXiv:2302.06675, who take a learning rate 3 to 10 times smaller than Adam's
    and a weight decay larger by as much.
    """
    config = plan.config
    return optax.chain(
        optax.scale_by_lion(b1=config.lion_beta1, b2=config.lion_beta2, mu_dtype=jnp.float32),
        plan.decay(),
        plan.descend(),
    )
