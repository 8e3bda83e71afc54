"""Digests of arrays that do not depend on how an array is split over devices.

The digest of an array is ``sum over elements of mix(bits ^ mix(position key)) mod 2^32``, taken
with two seeds: 64 bits. Addition is exact and commutes, so any split into shards or blocks gives
the same value; the position key makes moved elements count; and since ``mix`` is a bijection,
flipping one bit of one element always changes the sum. The position key is linear in the
coordinates, with an odd random multiplier per dimension, so arrays with more than 2^32 elements
need no 64-bit arithmetic. ``mix`` is the finaliser of MurmurHash3 (Appleby, public domain).
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

_SEEDS = (0x3C6EF372, 0xBB67AE85)
_HOST = "pinned_host"
_GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF
_MIX_1, _MIX_2 = 0x85EBCA6B, 0xC2B2AE35


def digest_arrays(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """Digest every array where it lies, without moving or copying it.

    All processes call it together (a sum over devices runs inside); each gets every digest.

    Args:
        arrays: global arrays of any shape, dtype (up to 32-bit, or 64-bit numbers) and sharding.

    Returns:
        16 hex digits per array name.

    Raises:
        TypeError: an array is complex or holds typed PRNG keys (store ``jax.random.key_data``).
    """
    # A program per array, not one for all: parameters and their moments share theirs. Each is
    # awaited: of many that wait on CPU devices one may keep a device from the sum in which those of
    # another process stand, for ever; and arrays in host memory come to the device one at a time.
    sums = {name: _array_sums(array).block_until_ready() for name, array in arrays.items()}
    return {name: to_hex(value) for name, value in jax.device_get(sums).items()}


def block_sums(block: jax.Array, offset: jax.Array) -> jax.Array:
    """The sums of one block of a larger array; those of all blocks add up (mod 2^32).

    Args:
        block: any shape.
        offset: uint32 ``[block.ndim]``, global index of the block's first element.

    Returns:
        uint32 ``[2]``, one sum per seed.
    """
    bits, pairs = _bits(block)
    offsets = [offset[axis] for axis in range(block.ndim)] + ([0] if pairs else [])
    mixed = []
    for seed in _SEEDS:
        key = jnp.uint32(seed)
        for axis, start in enumerate(offsets):
            index = lax.broadcasted_iota(jnp.uint32, bits.shape, axis) + start
            key = key + index * jnp.uint32(_multiplier(seed, axis))
        mixed.append(_mix(bits ^ _mix(key)))
    # One reduction for both seeds: two separate ones make XLA write the mixed values to memory.
    zeros = tuple(jnp.uint32(0) for _ in _SEEDS)
    sums = lax.reduce(
        tuple(mixed),
        zeros,
        lambda left, right: tuple(a + b for a, b in zip(left, right)),
        tuple(range(bits.ndim)),
    )
    return jnp.stack(sums)


def to_hex(sums: Iterable[int]) -> str:
    """Format the two sums as 16 hex digits."""
    return "".join(f"{int(value) & _MASK:08x}" for value in sums)


def _array_sums(array: jax.Array) -> jax.Array:
    """The sums of a whole array, replicated over its devices."""
    if array.sharding.memory_kind == _HOST:
        array = jax.device_put(array, array.sharding.with_memory_kind("device"))
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(_whole_sums, out_shardings=sharding)(array)


def _whole_sums(array: jax.Array) -> jax.Array:
    return block_sums(array, jnp.zeros(array.ndim, jnp.uint32))


def _bits(block: jax.Array) -> tuple[jax.Array, bool]:
    """The elements' bits as uint32, and whether each became two words on a new last axis."""
    dtype = block.dtype
    if dtype == jnp.bool_:
        return block.astype(jnp.uint32), False
    if jnp.issubdtype(dtype, jnp.integer):
        width = jnp.iinfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.floating):
        width = jnp.finfo(dtype).bits
    else:
        raise TypeError(f"no digest for arrays of dtype {dtype}")
    if width == 64:
        return lax.bitcast_convert_type(block, jnp.uint32), True
    unsigned = jnp.dtype(f"uint{width}")
    return lax.bitcast_convert_type(block, unsigned).astype(jnp.uint32), False


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(_MIX_1)
    h = (h ^ (h >> 13)) * jnp.uint32(_MIX_2)
    return h ^ (h >> 16)


def _multiplier(seed: int, axis: int) -> int:
    """Odd 32-bit constant of one dimension."""
    h = (seed + (axis + 1) * _GOLDEN) & _MASK
    h = ((h ^ (h >> 16)) * _MIX_1) & _MASK
    h = ((h ^ (h >> 13)) * _MIX_2) & _MASK
    return (h ^ (h >> 16)) | 1
