import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtron.layers.dropout import dropout, dropout_key, fold_in, keep_where, random_words

ROWS = jnp.array([5, 2, 11, 7], jnp.int32)
POSITIONS = jnp.arange(16, dtype=jnp.int32)
GENERATORS = ["hash", "threefry"]


def ones(**changes):
    """Dropout of ones [4, 16, 32] at a fixed site."""
    arguments = {"rate": 0.3, "rows": ROWS, "positions": POSITIONS, **changes}
    key = arguments.pop("key", dropout_key(1234, 3, 2, "hidden"))
    shape = (len(arguments["rows"]), len(arguments["positions"]), arguments.pop("features", 32))
    return np.asarray(dropout(jnp.ones(shape), key, **arguments))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("generator", GENERATORS)
def test_keep_rate_and_neighbour_correlations_are_within_four_sigma(generator: str, rate: float):
    rows = jnp.arange(32, dtype=jnp.int32)
    kept = ones(rows=rows, positions=jnp.arange(64), features=128, rate=rate, generator=generator)
    assert set(np.unique(kept)) == {0.0, np.float32(1 / (1 - rate))}
    z = ((kept != 0) - (1 - rate)) / np.sqrt(rate * (1 - rate))
    assert abs(z.mean()) * np.sqrt(z.size) < 4
    for axis in range(3):
        a, b = (np.take(z, np.arange(z.shape[axis] - 1) + shift, axis) for shift in (0, 1))
        assert abs((a * b).mean()) * np.sqrt(a.size) < 4, axis
    for other in (0, 1):  # sums over an axis have the spread of independent draws
        sums = z.sum(axis=(other, 2)) / np.sqrt(z.shape[other] * z.shape[2])
        assert abs(sums.var() - 1) < 4 * np.sqrt(2 / sums.size)


@pytest.mark.parametrize("generator", GENERATORS)
def test_any_slice_drawn_alone_equals_the_slice_of_the_whole(generator: str):
    whole = ones(generator=generator)
    part = ones(
        rows=ROWS[1:3],
        positions=POSITIONS[8:12],
        feature_offset=16,
        features=8,
        generator=generator,
    )
    np.testing.assert_array_equal(part, whole[1:3, 8:12, 16:24])
    order = jnp.array([2, 0, 3, 1])
    np.testing.assert_array_equal(ones(rows=ROWS[order], generator=generator), whole[order])


def test_every_sharding_draws_the_same_mask():
    whole = ones()
    for sizes in ((1, 1, 1), (4, 1, 2), (2, 4, 1), (1, 8, 1), (2, 2, 2)):
        count = int(np.prod(sizes))
        mesh = Mesh(np.array(jax.devices()[:count]).reshape(sizes), ("data", "context", "tensor"))
        size = 32 // sizes[2]

        def local(x, rows, positions, size=size):
            offset = jax.lax.axis_index("tensor") * size
            key = dropout_key(1234, 3, 2, "hidden")
            return dropout(x, key, rate=0.3, rows=rows, positions=positions, feature_offset=offset)

        spec = P("data", "context", "tensor")
        drawn = jax.jit(
            jax.shard_map(
                local, mesh=mesh, in_specs=(spec, P("data"), P("context")), out_specs=spec
            )
        )(jnp.ones((4, 16, 32)), ROWS, POSITIONS)
        np.testing.assert_array_equal(drawn, whole)


@pytest.mark.parametrize("generator", GENERATORS)
def test_masks_differ_between_seeds_steps_layers_sites_rows_and_positions(generator: str):
    sites = itertools.product((1, 2, 2**32 + 1), (0, 1), (0, 1), ("attention", "mlp"))
    masks = [ones(key=dropout_key(*site), generator=generator) for site in sites]
    assert len(masks) == 24
    rows = [row.tobytes() for mask in masks for row in mask]
    assert len(set(rows)) == len(rows)
    tokens = [token.tobytes() for token in masks[0].reshape(-1, 32)]
    assert len(set(tokens)) == len(tokens)
    # (step 1, layer 0) is not (step 0, layer 1)
    keys = dropout_key(1, 1, 0, "mlp"), dropout_key(1, 0, 1, "mlp")
    a, b = (ones(key=key, generator=generator) for key in keys)
    assert (a != b).mean() > 0.3


def test_a_mask_differs_from_the_same_place_of_another_step_as_chance_would_have_it():
    kept = [ones(features=2048, key=dropout_key(0, step, 0, "mlp")) != 0 for step in range(2)]
    agreement = (kept[0] == kept[1]).mean()
    expected = 0.7**2 + 0.3**2
    assert abs(agreement - expected) < 4 * np.sqrt(expected * (1 - expected) / kept[0].size)


def test_threefry_words_are_those_of_jax_random_at_the_global_index():
    key = jax.random.key_data(jax.random.key(7))
    index = jnp.arange(40, dtype=jnp.int32)
    ours = random_words((key[0], key[1]), jnp.int32(0), index, "threefry")
    words0, words1 = _partitionable_bits(key, 40)
    np.testing.assert_array_equal(ours, words0)
    bits = jax.random.bits(jax.random.wrap_key_data(key), (40,), jnp.uint32)
    np.testing.assert_array_equal(words0 ^ words1, bits)


def _partitionable_bits(key: jax.Array, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds, written out (Salmon et al. 2011), at counters (0, index)."""
    k = [int(key[0]), int(key[1])]
    k.append(k[0] ^ k[1] ^ 0x1BD11BDA)
    mask = 0xFFFFFFFF
    out = []
    for index in range(count):
        a, b = k[0], (index + k[1]) & mask
        for group in range(5):
            for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
                a = (a + b) & mask
                b = ((b << turn | b >> (32 - turn)) & mask) ^ a
            a = (a + k[(group + 1) % 3]) & mask
            b = (b + k[(group + 2) % 3] + group + 1) & mask
        out.append((a, b))
    return np.array([x for x, _ in out], np.uint32), np.array([y for _, y in out], np.uint32)


def test_hash_words_follow_the_written_out_mixer():
    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ x >> 16

    key = fold_in(dropout_key(5, 6, 7, "mlp"), jnp.int32(8))
    k0, k1 = int(key.word0), int(key.word1)
    got = int(random_words(key, jnp.int32(123456), jnp.int32(789)))
    first, second = mix(123456 ^ k0), mix((123456 + k1) & 0xFFFFFFFF)
    assert got == mix(mix(789 ^ first) ^ second)


def test_threshold_keeps_the_share_of_the_words_that_it_should():
    words = jnp.array([0, 2**30 - 1, 2**30, 2**32 - 1], jnp.uint32)
    np.testing.assert_array_equal(keep_where(words, 0.25), [False, False, True, True])


@pytest.mark.parametrize("generator", GENERATORS)
def test_jit_traced_step_and_layer_and_recomputation_change_nothing(generator: str):
    @jax.jit
    def loss(x, step, layer):
        def block(x):
            key = dropout_key(1234, step, layer, "hidden")
            return dropout(x, key, rate=0.3, rows=ROWS, positions=POSITIONS, generator=generator)

        return jnp.sum(jax.checkpoint(block)(x) ** 2)

    x = jnp.ones((4, 16, 32))
    # the gradient of sum((m x)^2) at 1 is 2 m^2
    gradient = jax.grad(loss)(x, jnp.int32(3), jnp.int32(2))
    np.testing.assert_allclose(gradient, 2 * ones(generator=generator) ** 2, rtol=1e-6)


def test_rate_zero_returns_the_input_and_low_precision_is_scaled_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 32)), jnp.bfloat16)
    key = dropout_key(0, 0, 0, "hidden")
    assert dropout(x, key, rate=0.0, rows=ROWS, positions=POSITIONS) is x
    dropped = dropout(x, key, rate=0.1, rows=ROWS, positions=POSITIONS)
    assert dropped.dtype == jnp.bfloat16
    exact = (np.asarray(x, np.float32) / np.float32(0.9)).astype(jnp.bfloat16)
    kept = np.asarray(dropped) != 0
    np.testing.assert_array_equal(np.asarray(dropped)[kept], exact[kept])
