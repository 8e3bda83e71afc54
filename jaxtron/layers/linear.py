"""Products of activations with weights: the GEMMs of attention and the MLP.

Layers call :func:`linear` and nothing else for them. What the backward pass keeps is the input and
the given weights themselves, never a form of a weight made here: a joined one would be kept a
second time by every layer, and the pipeline executor knows weights among a microbatch's residuals
by identity.

A weight may come in FP8 (``precision.fp8``); the layers do not notice.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.precision.fp8_product import fp8_linear
from jaxtron.precision.fp8_weight import Fp8Weight

Weight = jax.Array | Fp8Weight
Own = tuple[Callable[[jax.Array, int], jax.Array], int]
"""``(select, dim)``: this device's part of a weight is ``select(weight, axis of dim)``, where
``dim`` counts the weight's output dimensions. ``select`` only moves data and is linear."""


def linear(
    x: jax.Array,
    weights: Sequence[Weight],
    *,
    inputs: int = 1,
    own: Sequence[Own | None] | None = None,
) -> tuple[jax.Array, ...]:
    """``x @ w`` for each of ``weights``, in one matrix product.

    Args:
        x: ``[..., *in]``.
        weights: ``[*in, *out_i]`` each, in the dtype of ``x``; or all in FP8, of one product.
        inputs: number of ``in`` dimensions, which are summed over.
        own: per weight, which part of it this device uses; None: the whole.

    Returns:
        ``[..., *out_i]`` per weight.
    """
    parts = tuple(own) if own is not None else (None,) * len(weights)
    fp8 = [w for w in weights if isinstance(w, Fp8Weight)]
    if fp8:
        return fp8_linear(x, fp8, inputs=inputs, own=parts)
    arrays = [w for w in weights if not isinstance(w, Fp8Weight)]
    if len(arrays) == 1 and parts == (None,):
        # The derivative keeps x and the weight as it is.
        return (_contract_inputs(x, arrays[0], inputs),)
    return _joined_product(inputs, parts, x, tuple(arrays))


def _contract_inputs(x: jax.Array, weight: jax.Array, inputs: int) -> jax.Array:
    """Sum over the last dimensions of ``x`` and the first of ``weight``."""
    dims = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
    return lax.dot_general(x, weight, (dims, ((), ())))


def _own(weight: jax.Array, own: Own | None, inputs: int) -> jax.Array:
    return weight if own is None else own[0](weight, inputs + own[1])


def _join(inputs: int, own: Sequence[Own | None], weights: Sequence[jax.Array]) -> jax.Array:
    """The weights side by side, ``[*in, sum of the sizes of out_i]``."""
    parts = [_own(w, o, inputs) for w, o in zip(weights, own, strict=True)]
    return jnp.concatenate([p.reshape(*p.shape[:inputs], -1) for p in parts], axis=inputs)


def _split(
    inputs: int, own: Sequence[Own | None], y: jax.Array, weights: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Undo :func:`_join` in the last dimension of ``y``: ``[..., *out_i]`` per weight."""
    shapes = [
        jax.eval_shape(functools.partial(_own, own=o, inputs=inputs), w).shape[inputs:]
        for w, o in zip(weights, own, strict=True)
    ]
    pieces = lax.split(y, [math.prod(s) for s in shapes], axis=y.ndim - 1)
    return tuple(p.reshape(*y.shape[:-1], *s) for p, s in zip(pieces, shapes, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _joined_product(
    inputs: int, own: tuple[Own | None, ...], x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    y = _contract_inputs(x, _join(inputs, own, weights), inputs)
    return _split(inputs, own, y, weights)


def _joined_product_fwd(
    inputs: int, own: tuple[Own | None, ...], x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, tuple[jax.Array, ...]]]:
    return _joined_product(inputs, own, x, weights), (x, weights)


def _joined_product_bwd(
    inputs: int,
    own: tuple[Own | None, ...],
    residuals: tuple[jax.Array, tuple[jax.Array, ...]],
    cotangents: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x, weights = residuals
    batch = x.ndim - inputs
    g = jnp.concatenate([c.reshape(*x.shape[:batch], -1) for c in cotangents], axis=batch)
    joined, to_weights = jax.vjp(lambda ws: _join(inputs, own, ws), weights)
    dx = lax.dot_general(g, joined, (((batch,), (inputs,)), ((), ())))
    rows = tuple(range(batch))
    (dweights,) = to_weights(lax.dot_general(x, g, ((rows, rows), ((), ()))))
    return dx, dweights


_joined_product.defvjp(_joined_product_fwd, _joined_product_bwd)
