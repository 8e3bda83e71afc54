"""Products of activations with weights: the GEMMs of attention and the MLP.

Layers call :func:`linear` or :func:`linear_of_parts` and nothing else for them. What the backward
pass keeps is the input and the given weights themselves, never a form of a weight made here: a part
cut out of one would be kept a second time by every layer, and the pipeline executor knows weights
among a microbatch's residuals by identity.

A weight may come in FP8 (``precision.fp8``); the layers do not notice.
"""

import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax

from jaxtron.precision.fp8_product import Arrives, fp8_linear
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
    """``x @ w`` for each of ``weights``; see :func:`linear_of_parts`."""
    (outputs,) = linear_of_parts([x], weights, inputs=inputs, own=own)
    return outputs


def linear_of_parts(
    parts: Sequence[jax.Array],
    weights: Sequence[Weight],
    *,
    arrives: Arrives | None = None,
    inputs: int = 1,
    own: Sequence[Own | None] | None = None,
) -> list[tuple[jax.Array, ...]]:
    """``x @ w`` for each ``x`` of ``parts`` and each of ``weights``.

    Args:
        parts: ``[..., *in]`` each.
        weights: ``[*in, *out_i]`` each, in the dtype of ``x``; or all in FP8, of one product.
        arrives: what arrives in parts, if there are several: the input, or the gradient of the
            result (FP8 scales do not wait for it).
        inputs: number of ``in`` dimensions, which are summed over.
        own: per weight, which part of it this device uses; None: the whole.

    Returns:
        ``[..., *out_i]`` per part and weight.
    """
    used = tuple(own) if own is not None else (None,) * len(weights)
    fp8 = [w for w in weights if isinstance(w, Fp8Weight)]
    if fp8:
        return fp8_linear(parts, fp8, inputs=inputs, own=used, arrives=arrives)
    arrays = [w for w in weights if not isinstance(w, Fp8Weight)]
    return [
        tuple(
            _contract_inputs(x, w, inputs) if o is None else _own_product(inputs, o, x, w)
            for w, o in zip(arrays, used, strict=True)
        )
        for x in parts
    ]


def _contract_inputs(x: jax.Array, weight: jax.Array, inputs: int) -> jax.Array:
    """Sum over the last dimensions of ``x`` and the first of ``weight``."""
    dims = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
    return lax.dot_general(x, weight, (dims, ((), ())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _own_product(inputs: int, own: Own, x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x`` times this device's part of ``weight``; the backward pass keeps the whole."""
    return _contract_inputs(x, own[0](weight, inputs + own[1]), inputs)


def _own_product_fwd(
    inputs: int, own: Own, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _own_product(inputs, own, x, weight), (x, weight)


def _own_product_bwd(
    inputs: int, own: Own, residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # both are linear: the forward product is not run again
    _, vjp = jax.vjp(
        lambda x, w: _contract_inputs(x, own[0](w, inputs + own[1]), inputs), *residuals
    )
    return vjp(g)


_own_product.defvjp(_own_product_fwd, _own_product_bwd)
