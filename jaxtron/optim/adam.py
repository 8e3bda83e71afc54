"""Adam with decoupled weight decay."""

import jax.numpy as jnp
import optax

from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.plan import Plan

MOMENT_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def adamw(plan: Plan) -> optax.GradientTransformation:
    """Adam with decoupled decay that is multiplied by the learning rate.

    Loshchilov and Hutter 2019, arXiv:1711.05101, as in ``torch.optim.AdamW``.
    """
    return optax.chain(scale_by_adam(plan.config), plan.decay(), plan.descend())


def scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adam's direction.

    The first moment is stored in ``exp_avg_dtype`` and updated in float32. The second stays
    float32: a step changes it by ``1 - adam_beta2`` of itself, which bfloat16 (2^-9) rounds away.
    """
    return optax.scale_by_adam(
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_eps,
        mu_dtype=MOMENT_DTYPES[config.exp_avg_dtype],
    )
