"""Adafactor: second moments by rows and columns."""

from typing import Any, NamedTuple

import jax
import optax

from jaxtron.optim.matrices import Axes, Matrices, is_axes, matrices_of
from jaxtron.optim.plan import Plan


def adafactor(plan: Plan) -> optax.GradientTransformation:
    """Adafactor without momentum; weight decay is decoupled and multiplied by the learning rate.

    Shazeer and Stern 2018, arXiv:1804.04235: the second moment of a matrix is kept as the means of
    its rows and of its columns, an update whose RMS is above ``adafactor_clip_threshold`` is scaled
    to it, and with ``adafactor_scale_parameter`` steps are relative to the RMS of the weight (at
    least 1e-3). All of it holds for each matrix (:mod:`jaxtron.optim.matrices`), so that layers do
    not mix though they are stacked. The state is small and the same on every device.
    """
    config = plan.config
    direction = optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=config.adafactor_decay_rate,
            min_dim_size_to_factor=config.adafactor_min_dim_size_to_factor,
        ),
        optax.clip_by_block_rms(config.adafactor_clip_threshold),
        *([optax.scale_by_param_block_rms()] if config.adafactor_scale_parameter else []),
    )
    return optax.chain(per_matrix(direction, plan.logical_axes), plan.decay(), plan.descend())


def per_matrix(
    inner: optax.GradientTransformation, logical_axes: Any
) -> optax.GradientTransformation:
    """Apply ``inner`` to every matrix (or vector) of every parameter by itself.

    The state of a parameter is that of ``inner``, stacked over its matrices; in stacked layers
    ``[layers, matrices of a layer, ...]``, so that layers can be cut and put in another order in
    it as in the parameter.
    """

    def transformation(axes: Axes) -> optax.GradientTransformation:
        if axes[:1] == ("layers",):
            layer = _matrices_apart(inner, matrices_of(axes[1:]))
            return optax.GradientTransformation(jax.vmap(layer.init), jax.vmap(layer.update))
        return _matrices_apart(inner, matrices_of(axes))

    parts = jax.tree.map(transformation, logical_axes, is_leaf=is_axes)

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p, part: part.init(p), params, parts)

    def one(grad: jax.Array, state: Any, param: jax.Array, part: Any) -> _Result:
        return _Result(*part.update(grad, state, param))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        results = jax.tree.map(one, updates, state, params, parts)

        def field(name: str) -> Any:
            return jax.tree.map(
                lambda result: getattr(result, name),
                results,
                is_leaf=lambda node: isinstance(node, _Result),
            )

        return field("update"), field("state")

    return optax.GradientTransformation(init, update)


def _matrices_apart(
    inner: optax.GradientTransformation, matrices: Matrices
) -> optax.GradientTransformation:
    """``inner`` on each of the ``matrices`` of an array."""

    def init(param: jax.Array) -> Any:
        return jax.vmap(inner.init)(matrices.split(param))

    def update(grad: jax.Array, state: Any, param: Any = None) -> tuple[jax.Array, Any]:
        split = matrices.split(grad), state, matrices.split(param)
        new, state = jax.vmap(inner.update)(*split)
        return matrices.join(new, grad.shape), state

    return optax.GradientTransformation(init, update)


class _Result(NamedTuple):
    """Update and new state of one parameter."""

    update: jax.Array
    state: Any
