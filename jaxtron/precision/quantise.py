"""8-bit floating-point formats: scales and casts.

A tensor ``x`` is held as values ``q`` of an 8-bit format and one scale, ``x ≈ scale * q``
(Micikevicius et al. 2022, arXiv:2209.05433). The scale maps the largest magnitude ``amax`` to the
largest finite value of the format: 448 in E4M3, 57344 in E5M2.

Scales are rounded to bf16. In the form in which XLA recognises an FP8 matrix product
(``fp8_product.py``) values are multiplied by their scale in bf16, and the scale that is applied
must be the very one that the cast divided by. A scale 0.4 % larger or smaller costs no precision.

Between cast and product the values are kept as their bits, ``uint8``. ``jax.checkpoint`` rounds
what it keeps by the rules of IEEE formats, which E4M3 is not: its values above 240 would become
NaN. And bits need no derivative.
"""

import jax
import jax.numpy as jnp
from jax import lax

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2

_SMALLEST_SCALE = 2.0**-126  # its reciprocal is finite


def amax(x: jax.Array, first_axis: int = 0) -> jax.Array:
    """Largest magnitude of ``x`` over axes ``first_axis`` and up, fp32; NaN if ``x`` has one."""
    axes = tuple(range(first_axis, x.ndim))
    return jnp.max(jnp.abs(x), axis=axes).astype(jnp.float32)


def scale_of(largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Scale for tensors whose largest magnitude is ``largest``, fp32 holding a bf16 number.

    A tensor of zeros has scale 1. Infinity and NaN pass through, so that they reach the loss
    instead of becoming large finite numbers.
    """
    exact = jnp.maximum(largest / float(jnp.finfo(dtype).max), _SMALLEST_SCALE)
    return jnp.where(
        largest == 0, 1.0, lax.reduce_precision(exact, exponent_bits=8, mantissa_bits=7)
    )


def quantise(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Bits of ``x / scale`` in an 8-bit format, rounded to nearest even, saturating.

    A plain cast to E4M3 gives NaN above 464; here larger magnitudes become the largest finite
    value. NaN stays NaN, and an infinity becomes one instead of a large finite number.
    """
    largest = float(jnp.finfo(dtype).max)
    values = jnp.clip(x.astype(jnp.float32) * (1 / scale), -largest, largest)
    values = jnp.where(jnp.isinf(x), jnp.nan, values).astype(dtype)
    return lax.bitcast_convert_type(values, jnp.uint8)


def values_of(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The 8-bit floating-point values that ``bits`` holds."""
    return lax.bitcast_convert_type(bits, dtype)
