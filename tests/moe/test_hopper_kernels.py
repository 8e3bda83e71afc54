"""Products and gradients of the Hopper kernels against a product for each expert, on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.kernels.grouped_matmul import choose_grouped_matmul
from jaxtron.kernels.grouped_matmul_spec import GroupedMatmulSpec

pytestmark = pytest.mark.gpu

GROUPS, INNER, OUTER, SLOTS = 4, 384, 512, 2048
LOADS = [(256, 256, 256, 256), (1, 0, 700, 130), (0, 0, 0, 0), (0, 2048, 0, 0)]


def starts_of(sizes: tuple[int, ...], tile: int) -> np.ndarray:
    return np.cumsum([0, *(-(-n // tile) * tile for n in sizes)])


@pytest.mark.parametrize("sizes", LOADS, ids=str)
def test_products_and_gradients_are_those_of_every_expert(sizes: tuple[int, ...]) -> None:
    spec = GroupedMatmulSpec(SLOTS, GROUPS, INNER, OUTER, jnp.dtype(jnp.bfloat16), 256, None)
    kernel = choose_grouped_matmul("mosaic_gpu", spec, "gpu")
    keys = jax.random.split(jax.random.key(0), 3)
    starts = starts_of(sizes, kernel.row_tile)
    used = np.zeros((SLOTS, 1), np.float32)
    for start, size in zip(starts, sizes, strict=False):
        used[start : start + size] = 1
    x = (jax.random.normal(keys[0], (SLOTS, INNER)) * used).astype(jnp.bfloat16)
    g = (jax.random.normal(keys[1], (SLOTS, OUTER)) * used).astype(jnp.bfloat16)
    w = jax.random.normal(keys[2], (GROUPS, INNER, OUTER)).astype(jnp.bfloat16)
    out, vjp = jax.vjp(lambda x, w: kernel(x, w, jnp.array(sizes, jnp.int32)), x, w)
    d_x, d_w = vjp(g)
    x, g, w = (np.asarray(a, np.float64) for a in (x, g, w))
    for e in range(GROUPS):
        rows = slice(starts[e], starts[e + 1])
        for actual, expected in (
            (out[rows], x[rows] @ w[e]),
            (d_x[rows], g[rows] @ w[e].T),
            (d_w[e], x[rows].T @ g[rows]),
        ):
            scale = np.max(np.abs(expected), initial=1e-9)
            error = np.abs(np.asarray(actual, np.float64) - expected)
            assert np.max(error, initial=0) <= 2**-7 * scale


@pytest.mark.parametrize("sizes", LOADS, ids=str)
def test_gradients_of_weights_are_added_to_a_sum(sizes: tuple[int, ...]) -> None:
    """In fp32, and to the sum of an expert without rows nothing."""
    spec = GroupedMatmulSpec(SLOTS, GROUPS, INNER, OUTER, jnp.dtype(jnp.bfloat16), 256, None)
    kernel = choose_grouped_matmul("mosaic_gpu", spec, "gpu")
    rng, starts = np.random.default_rng(0), starts_of(sizes, kernel.row_tile)
    used = np.zeros((SLOTS, 1))
    for start, size in zip(starts, sizes, strict=False):
        used[start : start + size] = 1
    a = jnp.asarray(rng.normal(size=(SLOTS, INNER)) * used, jnp.bfloat16)
    b = jnp.asarray(rng.normal(size=(SLOTS, OUTER)) * used, jnp.bfloat16)
    total = rng.normal(size=(GROUPS, INNER, OUTER)).astype(np.float32)
    counts = jnp.array(sizes, jnp.int32)
    add = jax.jit(kernel.add_rows_times_rows, donate_argnums=0)
    actual = np.asarray(add(add(jnp.asarray(total), a, b, counts), a, b, counts))
    a, b = (np.asarray(each.astype(jnp.float32), np.float64) for each in (a, b))
    for e, size in enumerate(sizes):
        rows = slice(starts[e], starts[e + 1])
        if size == 0:
            np.testing.assert_array_equal(actual[e], total[e])
        # of fp32 sums, where one of bf16 products would be off by 2**-9 of them
        scale = np.abs(total[e]) + 2 * np.abs(a[rows]).T @ np.abs(b[rows])
        error = np.abs(actual[e] - (total[e] + 2 * a[rows].T @ b[rows]))
        assert np.all(error <= 2**-18 * scale)


@pytest.mark.parametrize("sizes", LOADS, ids=str)
def test_fp8_products_are_those_of_every_expert(sizes: tuple[int, ...]) -> None:
    """All operands are positive, so that an accumulator of few bits would lose part of the sum."""
    spec = GroupedMatmulSpec(SLOTS, GROUPS, INNER, OUTER, jnp.dtype(jnp.bfloat16), 256, None, True)
    kernel = choose_grouped_matmul("mosaic_gpu", spec, "gpu")
    assert kernel.fp8 is not None
    rng, starts = np.random.default_rng(0), starts_of(sizes, kernel.row_tile)
    used = np.zeros((SLOTS, 1))
    for start, size in zip(starts, sizes, strict=False):
        used[start : start + size] = 1
    x = jnp.asarray(rng.uniform(0, 3, (SLOTS, INNER)) * used, jnp.float8_e4m3fn)
    g = jnp.asarray(rng.uniform(0, 3, (SLOTS, OUTER)) * used, jnp.float8_e5m2)
    w = jnp.asarray(rng.uniform(0, 3, (GROUPS, OUTER, INNER)), jnp.float8_e4m3fn)
    counts, scale = jnp.array(sizes, jnp.int32), jnp.float32(0.25)
    out = kernel.fp8.rows_times_weights(x, w, counts, scale, jnp.bfloat16)
    d_x = kernel.fp8.rows_times_weights(g, jnp.swapaxes(w, 1, 2), counts, scale, jnp.bfloat16)
    d_w = kernel.fp8.rows_times_rows(x.T, g.T, counts, scale)
    x, g, w = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, g, w))
    for e in range(GROUPS):
        rows = slice(starts[e], starts[e + 1])
        for actual, expected in (
            (out[rows], x[rows] @ w[e].T),
            (d_x[rows], g[rows] @ w[e]),
            (d_w[e], x[rows].T @ g[rows]),
        ):
            # 2**-8: rounding of bf16 results. 2**-10: tensor cores add 32 products at a time and
            # cut each at 2**-13 of the largest; over sums of 128 such numbers that takes away
            # 8e-4 at most, as the same done in NumPy shows, and 6e-4 was seen on an H200.
            np.testing.assert_allclose(
                np.asarray(actual, np.float64), expected / 4, rtol=2**-8 + 2**-10
            )
