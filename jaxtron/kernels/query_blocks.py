"""Cutting queries in blocks, so that not all of their scores exist at a time."""

import jax
import jax.numpy as jnp

MAX_SCORE_BYTES = 256 * 2**20
"""Float32 scores that may exist at a time [bytes]."""


def block_length(length: int, bytes_per_query: int) -> int:
    """Queries at a time; blocks of nearly equal length, so that little padding is computed."""
    blocks = -(-length * bytes_per_query // MAX_SCORE_BYTES)
    return -(-length // min(blocks, length))


def cut_blocks(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Cut ``axis`` (zero-padded) into blocks, whose number becomes the leading axis."""
    count = -(-x.shape[axis] // block)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, count * block - x.shape[axis])
    x = jnp.pad(x, padding)
    x = x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)
