"""The digest against big-integer arithmetic; blind to the layout and to nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtron.checkpoint import digest as digest_module
from jaxtron.checkpoint.digest import block_sums, digest_arrays, to_hex
from tests.checkpoint.states import mesh

MASK = 2**32 - 1


def _mix(h: int) -> int:
    h ^= h >> 16
    h = h * 0x85EBCA6B & MASK
    h ^= h >> 13
    h = h * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def reference(words: np.ndarray) -> str:
    """The definition, one element at a time in Python integers."""
    digits = ""
    for seed in (0x3C6EF372, 0xBB67AE85):
        total = 0
        for index in np.ndindex(words.shape):
            key = seed
            for axis, i in enumerate(index):
                key += i * (_mix((seed + (axis + 1) * 0x9E3779B9) & MASK) | 1)
            total += _mix(int(words[index]) ^ _mix(key & MASK))
        digits += f"{total & MASK:08x}"
    return digits


def digest(array: jax.Array) -> str:
    return digest_arrays({"x": array})["x"]


def test_murmur_finaliser_matches_its_published_value():
    # MurmurHash3_x86_32 of the empty string with seed 1 is fmix32(1).
    assert _mix(1) == 0x514E28B7


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_digest_of_floats_is_its_definition(dtype):
    values = np.random.default_rng(0).standard_normal((3, 4, 5), np.float32)
    array = jnp.asarray(values).astype(dtype)
    words = np.asarray(array).view(f"uint{8 * array.dtype.itemsize}")
    assert digest(array) == reference(words)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8", "uint16", "bool", "int4"])
def test_digest_of_integers_is_its_definition(dtype):
    bits = {"bool": 1, "int4": 4}.get(dtype) or 8 * np.dtype(dtype).itemsize
    words = np.random.default_rng(0).integers(0, 2**bits, (6, 3), np.uint32)
    values = words.astype(np.uint8) if bits < 8 else words.astype(f"uint{bits}").view(dtype)
    if dtype == "int4":
        values = np.where(values < 8, values, values - 16).astype(np.int8)
    assert digest(jnp.asarray(values).astype(dtype)) == reference(words)


def test_digest_of_a_scalar_is_its_definition():
    assert digest(jnp.int32(-1)) == reference(np.array(MASK, np.uint32))


def test_eight_byte_elements_count_as_two_words():
    with jax.enable_x64(True):
        value = np.array([[1.5, -2.0], [3e300, 0.0]])
        assert digest(jnp.asarray(value)) == reference(value.view(np.uint32).reshape(2, 2, 2))


def test_every_layout_gives_the_same_digest():
    host = np.random.default_rng(0).standard_normal((8, 16, 8), np.float32)
    expected = reference(host.view(np.uint32))
    assert digest(jnp.asarray(host)) == expected
    whole, split, both = (), ("fsdp", None, "tensor"), (None, ("fsdp", "tensor"))
    for shape, spec in [((8, 1), split), ((1, 8), split), ((4, 2), split), ((4, 2), both),
                        ((4, 2), whole), ((2, 1), split)]:  # fmt: skip
        array = jax.device_put(host, NamedSharding(mesh(*shape), PartitionSpec(*spec)))
        assert digest(array) == expected, (shape, spec)


def test_explicit_axes_and_host_memory_give_the_same_digest():
    host = np.arange(64, dtype=np.int32).reshape(8, 8)
    expected = reference(host)
    explicit = jax.make_mesh((8,), ("fsdp",), (AxisType.Explicit,))
    assert digest(jax.device_put(host, NamedSharding(explicit, PartitionSpec("fsdp")))) == expected
    on_host = NamedSharding(mesh(4, 2), PartitionSpec("fsdp"), memory_kind="pinned_host")
    assert digest(jax.device_put(host, on_host)) == expected


def test_any_single_flipped_bit_changes_both_halves():
    host = np.random.default_rng(0).standard_normal((4, 3), np.float32)
    words = host.view(np.uint32)
    whole = digest(jnp.asarray(host))
    for index, bit in itertools.product(np.ndindex(4, 3), range(32)):
        flipped = words.copy()
        flipped[index] ^= np.uint32(1 << bit)
        got = digest(jnp.asarray(flipped.view(np.float32)))
        assert got[:8] != whole[:8] and got[8:] != whole[8:], (index, bit)


def test_moved_elements_and_signed_zero_change_the_digest():
    host = np.random.default_rng(0).standard_normal((4, 6), np.float32)
    variants = [host, host[::-1], host[:, ::-1], np.roll(host, 1, 1), host.reshape(6, 4), host.T]
    assert len({digest(jnp.asarray(v)) for v in variants}) == len(variants)
    zero = np.zeros((2, 2), np.float32)
    assert digest(jnp.asarray(zero)) != digest(jnp.asarray(-zero))


def test_blocks_of_an_array_add_up_to_its_digest():
    host = np.random.default_rng(0).standard_normal((5, 7), np.float32)
    total = np.zeros(2, np.uint32)
    for rows, columns in itertools.product(((0, 2), (2, 5)), ((0, 3), (3, 7))):
        block = jnp.asarray(host[slice(*rows), slice(*columns)])
        total += np.asarray(block_sums(block, jnp.asarray([rows[0], columns[0]], jnp.uint32)))
    assert to_hex(total) == reference(host.view(np.uint32))


def test_digesting_needs_no_copy_of_the_array():
    # Checked per device: neither the mixed values nor a gathered copy may be written to memory.
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("fsdp", "tensor"))
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)
    zero = jnp.zeros(2, jnp.uint32)
    memory = jax.jit(lambda a: block_sums(a, zero)).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * 1024 * 1024 * 4 / 8


def test_complex_arrays_are_refused():
    with pytest.raises(TypeError, match="complex64"):
        digest(jnp.ones(3, jnp.complex64))


def test_one_program_at_a_time(monkeypatch):
    # Two processes with many in flight, of moments in host memory, stood still in most runs.
    sums, array_sums = [], digest_module._array_sums

    def noted(array):
        assert all(earlier.is_ready() for earlier in sums)
        sums.append(array_sums(array))
        return sums[-1]

    monkeypatch.setattr(digest_module, "_array_sums", noted)
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("fsdp", "tensor"))
    array = jax.device_put(jnp.zeros((8, 2**18)), sharding)
    assert len(digest_arrays({str(i): array for i in range(4)})) == 4
