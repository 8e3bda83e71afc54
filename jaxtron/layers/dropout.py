"""Dropout whose mask depends on global indices alone.

A bit is a function of (seed, step, layer, site, row in the global batch, global token position,
global feature index), so any sharding, microbatch cut or recomputation draws the same mask.
Random words come from a keyed integer hash (two rounds of Wellons' 32-bit mixer "lowbias32"), which
fuses with its use and stores nothing; ``generator="threefry"`` draws from JAX's threefry at the
same indices and is the reference in tests (about 60 times slower on a CPU).

Seed, step, layer, site and row go into a 64-bit key, position and feature are the two 32-bit
counters, so no product of sizes can wrap around 2**32.
"""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

Generator = Literal["hash", "threefry"]


class DropoutKey(NamedTuple):
    """Two uint32 words, scalars or arrays of one shape (one key per element)."""

    word0: jax.Array
    word1: jax.Array


def dropout_key(seed: int, step: jax.Array | int, layer: jax.Array | int, site: str) -> DropoutKey:
    """Key of one dropout site in one step.

    Args:
        seed: ``train.seed``; its lowest 64 bits are used.
        step: optimizer step, int32 scalar.
        layer: number of the layer in the whole model, int32 scalar (0 outside the layers).
        site: name of the place within the layer, e.g. ``"attention"``; static.
    """
    words = (jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32 & 0xFFFFFFFF))
    of_step = _threefry(*words, jnp.uint32(0), _uint32(step))
    return DropoutKey(*_threefry(*of_step, _uint32(layer), jnp.uint32(zlib.crc32(site.encode()))))


def fold_in(key: DropoutKey, index: jax.Array) -> DropoutKey:
    """One key for every element of ``index`` (int32, broadcast against the words of ``key``)."""
    return DropoutKey(*_threefry(*key, jnp.uint32(0), _uint32(index)))


def random_words(
    key: DropoutKey, position: jax.Array, feature: jax.Array, generator: Generator = "hash"
) -> jax.Array:
    """Random uint32 words at the indices (position, feature); all arguments broadcast.

    Args:
        key: words of any shape.
        position: int32, first index.
        feature: int32, second index; make it the innermost axis of the result, since what depends
            on ``key`` and ``position`` alone is computed once.
        generator: ``hash`` or ``threefry``.
    """
    position, feature = _uint32(position), _uint32(feature)
    if generator == "threefry":
        return _threefry(*key, position, feature)[0]
    # Both words carry the position: with 32 bits alone, some of 2**16 tokens would share a mask.
    first = _mix(position ^ key.word0)
    second = _mix(position + key.word1)
    return _mix(_mix(feature ^ first) ^ second)


def keep_where(words: jax.Array, rate: float) -> jax.Array:
    """Which elements stay: true with probability ``1 - rate`` for uniform uint32 ``words``."""
    return words >= jnp.uint32(round(rate * 2**32))


def dropout(
    x: jax.Array,
    key: DropoutKey,
    *,
    rate: float,
    rows: jax.Array,
    positions: jax.Array,
    feature_offset: jax.Array | int = 0,
    generator: Generator = "hash",
) -> jax.Array:
    """Zero elements with probability ``rate`` and scale the others by ``1 / (1 - rate)``.

    Args:
        x: local activations [batch, seq, feature].
        key: scalar key of the site, see :func:`dropout_key`.
        rate: static, in [0, 1); 0 returns ``x``.
        rows: int32 [batch], the rows' numbers in the global batch.
        positions: int32 [seq], global token positions (not reset between documents).
        feature_offset: global number of the first local feature.
        generator: see :func:`random_words`.

    Returns:
        As ``x`` in shape and dtype; the scaling is done in float32.
    """
    if rate == 0.0:
        return x
    row_key = fold_in(key, rows[:, None, None])
    features = jnp.arange(x.shape[-1], dtype=jnp.int32) + feature_offset
    words = random_words(row_key, positions[None, :, None], features, generator)
    scaled = (x.astype(jnp.float32) * (1.0 / (1.0 - rate))).astype(x.dtype)
    return jnp.where(keep_where(words, rate), scaled, jnp.zeros((), x.dtype))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "rows", "heads", "query_positions", "key_positions"],
    meta_fields=["rate", "generator"],
)
@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention probabilities: (row, head) go into the key, (query, key) are indices.

    A pytree, so that it passes through ``jax.checkpoint``.

    Attributes:
        key: scalar key of the site.
        rate: static, in (0, 1).
        rows: int32 [batch], rows in the global batch.
        heads: int32 [heads], the query heads' numbers in the whole model.
        query_positions: int32 [query], global token positions.
        key_positions: int32 [key], global token positions.
        generator: see :func:`random_words`.
    """

    key: DropoutKey
    rate: float
    rows: jax.Array
    heads: jax.Array
    query_positions: jax.Array
    key_positions: jax.Array
    generator: Generator = "hash"

    def apply(self, probabilities: jax.Array, query_positions: jax.Array) -> jax.Array:
        """Drop from float32 [batch, heads, query, key] the rows of int32 ``query_positions``."""
        row_head = fold_in(fold_in(self.key, self.rows[:, None]), self.heads)
        words = random_words(
            DropoutKey(*(word[:, :, None, None] for word in row_head)),
            query_positions[:, None],
            self.key_positions,
            self.generator,
        )
        return jnp.where(keep_where(words, self.rate), probabilities / (1.0 - self.rate), 0.0)


def _uint32(value: jax.Array | int) -> jax.Array:
    return jnp.asarray(value).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words in which every input bit changes every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _threefry(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 (Salmon et al. 2011) of (key, key, counter, counter), broadcast."""
    # The primitive wants operands of one shape that vary over the same axes of a manual mesh;
    # adding a zero made of all of them gives both.
    zero = jnp.uint32(0) * sum(operands, start=jnp.uint32(0))
    bind: Callable[..., tuple[jax.Array, jax.Array]] = threefry2x32_p.bind
    word0, word1 = bind(*(operand + zero for operand in operands))
    return word0, word1
