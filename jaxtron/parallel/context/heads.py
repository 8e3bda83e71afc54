"""Exchange of heads for tokens between members of the ``context`` axis (DeepSpeed-Ulysses).

Jacobs et al. 2023, arXiv:2309.14509: A members trade so that each has all tokens of the group and
one A-th of the heads. Query heads are cut in order, and so are their key/value heads, so a query
head meets its own group.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.parallel.context.layout import AXIS, ContextLayout


def tokens_for_heads(x: jax.Array, layout: ContextLayout) -> jax.Array:
    """``[b, s, heads, d] -> [b, A s, heads / A, d]``, tokens of the group chunk after chunk."""
    if layout.all_to_all == 1:
        return x
    x = lax.all_to_all(
        x, AXIS, 2, 1, tiled=True, axis_index_groups=layout.head_groups()
    )  # tokens: member, chunk, place in the part
    b, s, heads, d = x.shape
    x = x.reshape(b, layout.all_to_all, 2, -1, heads, d)
    return jnp.swapaxes(x, 1, 2).reshape(b, s, heads, d)


def heads_for_tokens(x: jax.Array, layout: ContextLayout) -> jax.Array:
    """``[b, A s, heads / A, d] -> [b, s, heads, d]``, the inverse."""
    if layout.all_to_all == 1:
        return x
    b, s, heads, d = x.shape
    x = x.reshape(b, 2, layout.all_to_all, -1, heads, d)
    x = jnp.swapaxes(x, 1, 2).reshape(b, s, heads, d)
    return lax.all_to_all(x, AXIS, 1, 2, tiled=True, axis_index_groups=layout.head_groups())


def own_heads(heads: jax.Array, layout: ContextLayout) -> jax.Array:
    """Of the numbers ``[heads]``, those that this member computes after the exchange."""
    if layout.all_to_all == 1:
        return heads
    part = heads.shape[0] // layout.all_to_all
    return lax.dynamic_slice_in_dim(heads, lax.axis_index(AXIS) % layout.all_to_all * part, part)
