"""Grouped products against a loop over rows, with empty groups, unused rows and skewed loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.errors import ConfigError
from jaxtron.kernels.grouped_matmul import choose_grouped_matmul
from jaxtron.kernels.grouped_matmul_spec import GroupedMatmulSpec

ROWS, GROUPS, INNER, OUTER = 64, 4, 6, 10


def spec(most: int | None = None, **changes) -> GroupedMatmulSpec:
    values = {
        "rows": ROWS,
        "experts": GROUPS,
        "inner": INNER,
        "outer": OUTER,
        "dtype": jnp.dtype("float32"),
        "expected": ROWS // GROUPS,
        "most": most,
    }
    return GroupedMatmulSpec(**(values | changes))


# balanced, with unused rows, one expert takes all, nobody takes any
LOADS = [(16, 16, 16, 16), (3, 0, 20, 7), (0, 64, 0, 0), (0, 0, 0, 0), (64, 0, 0, 0)]


@pytest.mark.parametrize("sizes", LOADS)
@pytest.mark.parametrize("name", ["xla", "bucketed"])
def test_products_and_gradients_are_those_of_a_loop(name: str, sizes: tuple[int, ...]) -> None:
    kernel = choose_grouped_matmul(name, spec(), "cpu")
    rng = np.random.default_rng(0)
    used = sum(sizes)
    x = rng.normal(size=(ROWS, INNER)).astype(np.float32)
    x[used:] = 0
    w = rng.normal(size=(GROUPS, INNER, OUTER)).astype(np.float32)
    cotangent = rng.normal(size=(ROWS, OUTER)).astype(np.float32)
    out, vjp = jax.vjp(lambda x, w: kernel(x, w, jnp.asarray(sizes, jnp.int32)), x, w)
    d_x, d_w = vjp(jnp.asarray(cotangent))

    expected, e_x, e_w = np.zeros((ROWS, OUTER)), np.zeros_like(x), np.zeros_like(w)
    group = np.repeat(np.arange(GROUPS), sizes)
    for row, g in enumerate(group):
        expected[row] = x[row] @ w[g]
        e_x[row] = cotangent[row] @ w[g].T
        e_w[g] += np.outer(x[row], cotangent[row])
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(d_x, e_x, atol=1e-5)
    np.testing.assert_allclose(d_w, e_w, atol=1e-4)
    assert not np.any(np.asarray(d_w)[np.asarray(sizes) == 0]), "empty groups: exactly zero"


@pytest.mark.parametrize("sizes", [(16, 16, 16, 16), (3, 0, 20, 7), (0, 0, 0, 0)])
@pytest.mark.parametrize("name", ["xla", "bucketed", "padded"])
def test_gradients_of_weights_are_added_to_a_sum(name: str, sizes: tuple[int, ...]) -> None:
    kernel = choose_grouped_matmul(name, spec(most=16 if name == "padded" else None), "cpu")
    rng = np.random.default_rng(0)
    sizes = tuple(min(n, 16) for n in sizes) if kernel.strided else sizes
    starts = np.arange(GROUPS) * 16 if kernel.strided else np.cumsum((0, *sizes))
    a, b = np.zeros((ROWS, INNER), np.float32), np.zeros((ROWS, OUTER), np.float32)
    total = rng.normal(size=(GROUPS, INNER, OUTER)).astype(np.float32)
    expected = total.astype(np.float64)
    for e, size in enumerate(sizes):
        rows = slice(starts[e], starts[e] + size)
        a[rows], b[rows] = rng.normal(size=(size, INNER)), rng.normal(size=(size, OUTER))
        for row in range(starts[e], starts[e] + size):
            expected[e] += np.outer(a[row], b[row])
    actual = kernel.add_rows_times_rows(
        jnp.asarray(total), jnp.asarray(a), jnp.asarray(b), jnp.asarray(sizes, jnp.int32)
    )
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    idle = np.asarray(sizes) == 0
    np.testing.assert_array_equal(np.asarray(actual)[idle], total[idle])


def test_padded_products_are_batched_over_equal_strides() -> None:
    kernel = choose_grouped_matmul("padded", spec(most=16), "cpu")
    assert kernel.strided
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(ROWS, INNER)), rng.normal(size=(GROUPS, INNER, OUTER))
    out = kernel(jnp.asarray(x), jnp.asarray(w), jnp.asarray([16, 3, 0, 9]))
    for g in range(GROUPS):
        np.testing.assert_allclose(out[16 * g : 16 * g + 16], x[16 * g : 16 * g + 16] @ w[g], 1e-4)


def test_the_masked_dense_product_is_refused_on_gpus() -> None:
    with pytest.raises(ConfigError, match="all rows with all 4 experts.*backend to auto"):
        choose_grouped_matmul("xla", spec(), "gpu")


def test_padding_needs_a_capacity() -> None:
    with pytest.raises(ConfigError, match="moe_expert_capacity_factor is null"):
        choose_grouped_matmul("padded", spec(), "cpu")


def test_auto_pads_to_the_capacity_and_is_exact_on_cpus_without_one() -> None:
    assert choose_grouped_matmul("auto", spec(most=16), "cpu").name == "padded"
    assert choose_grouped_matmul("auto", spec(), "cpu").name == "xla"
