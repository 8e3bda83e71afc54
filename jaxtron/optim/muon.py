"""Muon: momentum, orthogonalised matrix by matrix."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtron.errors import ConfigError
from jaxtron.optim.adam import scale_by_adam
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.matrices import Axes, is_axes, matrices_of
from jaxtron.optim.newton_schulz import COEFFICIENTS, orthogonalize
from jaxtron.optim.plan import Plan

TABLE_AXES = ("vocab", "position")
"""Axes of lookup tables and of the output layer, which are no hidden matrices."""


def muon(plan: Plan) -> optax.GradientTransformation:
    """Muon for hidden matrices, AdamW for embeddings, output layer, norms and biases.

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, with Megatron's choices: query,
    key, value, gate and up are orthogonalised apart, each whole (:mod:`jaxtron.optim.matrices`),
    and weight decay is decoupled for both kinds. The update is a function of global arrays, so it
    does not depend on how a matrix is split over devices.
    """
    labels = jax.tree.map(
        lambda axes: "muon" if is_hidden_matrix(axes) else "adam",
        plan.logical_axes,
        is_leaf=is_axes,
    )
    hidden = jax.tree.map(
        lambda axes: axes if is_hidden_matrix(axes) else optax.MaskedNode(),
        plan.logical_axes,
        is_leaf=is_axes,
    )
    directions = {
        "muon": scale_by_muon(plan.config, hidden),
        "adam": scale_by_adam(plan.config),
    }
    return optax.chain(optax.partition(directions, labels), plan.decay(), plan.descend())


def is_hidden_matrix(axes: Axes) -> bool:
    """Whether Muon, not AdamW, updates a parameter with these logical axes."""
    return matrices_of(axes).is_matrix and not set(axes) & set(TABLE_AXES)


class MuonState(NamedTuple):
    """Momentum, float32, in a tree like the parameters."""

    momentum: Any


def scale_by_muon(config: OptimizerConfig, logical_axes: Any) -> optax.GradientTransformation:
    """Muon's direction for parameters that are all hidden matrices.

    ``m <- beta m + (1 - beta) g``; the direction is ``m`` or, with ``muon_nesterov``,
    ``beta m + (1 - beta) g``, orthogonalised and scaled by its shape.
    """
    beta = config.muon_momentum

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))

    def mix(momentum: jax.Array, grad: jax.Array) -> jax.Array:
        return beta * momentum + (1.0 - beta) * grad.astype(jnp.float32)

    def direction(x: jax.Array, axes: Axes) -> jax.Array:
        matrices = matrices_of(axes)
        split = matrices.split(x)
        orthogonal = orthogonalize(
            split,
            steps=config.muon_num_ns_steps,
            coefficient_type=config.muon_coefficient_type,
            precision=config.muon_fp32_matmul_prec,
        )
        scale = shape_scale(config, fan_in=split.shape[1], fan_out=split.shape[2])
        return matrices.join(scale * orthogonal, x.shape)

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        momentum = jax.tree.map(mix, state.momentum, grads)
        moving = jax.tree.map(mix, momentum, grads) if config.muon_nesterov else momentum
        return jax.tree.map(direction, moving, logical_axes), MuonState(momentum)

    return optax.GradientTransformation(init, update)


def shape_scale(config: OptimizerConfig, *, fan_in: int, fan_out: int) -> float:
    """Factor of an orthogonal ``[fan_in, fan_out]`` update, ``muon_extra_scale_factor`` included.

    ``spectral``: ``sqrt(max(fan_out, fan_in))``, so that learning rates of Adam carry over (with an
    extra factor of about 0.2; Liu et al. 2025, arXiv:2502.16982). ``shape_scaling``:
    ``sqrt(max(1, fan_out / fan_in))`` (Jordan et al.). ``unit_rms_norm``:
    ``sqrt(fan_out / fan_in)`` (Bernstein 2025, https://jeremybernste.in/writing/deriving-muon).
    """
    ratio = {
        "spectral": max(fan_out, fan_in),
        "shape_scaling": max(1.0, fan_out / fan_in),
        "unit_rms_norm": fan_out / fan_in,
    }[config.muon_scale_mode]
    return config.muon_extra_scale_factor * ratio**0.5


def check_muon(config: OptimizerConfig) -> None:
    """Refuse a number of steps that cuts a series of coefficients short.

    Raises:
        ConfigError: with the numbers that fit.
    """
    series = len(COEFFICIENTS[config.muon_coefficient_type])
    if config.muon_num_ns_steps % series:
        raise ConfigError(
            f"optimizer.muon_num_ns_steps={config.muon_num_ns_steps} is not a multiple of the "
            f"{series} steps of optimizer.muon_coefficient_type={config.muon_coefficient_type}"
        )
