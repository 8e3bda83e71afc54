"""Balancing without a loss: the bias that steers the choice of experts.

The bias is a *buffer*: a leaf among the parameters, stored and restored with them, that no gradient
and no optimizer touches. Once a step it moves against the load that the whole global batch put on
the expert. Wang et al. 2024 (arXiv:2408.15664); DeepSeek-V3 (arXiv:2412.19437).
"""

from typing import Any

import jax
import jax.numpy as jnp

BUFFER = "expert_bias"
"""Name of a buffer's leaf."""


def split_buffers(tree: Any) -> tuple[Any, Any]:
    """Cut a nested dict like the parameters in what is trained and the buffers."""
    trained, buffers = {}, {}
    for name, value in tree.items():
        if name == BUFFER:
            buffers[name] = value
        elif isinstance(value, dict):
            trained[name], below = split_buffers(value)
            if below:
                buffers[name] = below
        else:
            trained[name] = value
    return trained, buffers


def join_buffers(trained: Any, buffers: Any) -> Any:
    """The inverse of :func:`split_buffers`."""
    joined = dict(trained)
    for name, value in buffers.items():
        joined[name] = value if name == BUFFER else join_buffers(trained[name], value)
    return joined


def update_bias(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """``bias + rate * sign(mean load - load)``.

    Args:
        bias: fp32 ``[layers, experts]``.
        load: tokens of the global batch that chose each expert, same shape.
        rate: ``model.moe_router_bias_update_rate``.
    """
    load = load.astype(jnp.float32)
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
