"""Kernels of row work against NumPy: on a GPU, and interpreted on CPUs; NaN in unused tiles."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.kernels import grouped_matmul_mosaic
from jaxtron.kernels.grouped_matmul_hopper import ROW_TILE, plgpu_module
from jaxtron.kernels.grouped_matmul_mosaic import MosaicRowKernels

SLOTS, TOKENS, TOPK = 512, 80, 3
# some and none, nobody takes any, one takes all
LOADS = [(100, 0, 129), (0, 0, 0), (0, 512, 0)]


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MosaicRowKernels]:
    if request.param == "gpu":
        yield MosaicRowKernels()
        return
    if not hasattr(plgpu_module(), "force_gpu_interpret_mode"):
        pytest.skip("this JAX does not interpret GPU kernels")
    monkeypatch.setattr(grouped_matmul_mosaic, "multiprocessors", lambda: 1)
    with plgpu_module().force_gpu_interpret_mode():
        yield MosaicRowKernels()


def widths(small: int, large: int) -> list[Any]:
    """The large one takes the interpreter long."""
    return [small, pytest.param(large, marks=pytest.mark.gpu)]


def in_use(sizes: tuple[int, ...]) -> int:
    return sum(math.ceil(size / ROW_TILE) * ROW_TILE for size in sizes)


def exact(a: jax.Array) -> np.ndarray:
    return np.asarray(a.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("width", widths(128, 1536))
@pytest.mark.parametrize("sizes", LOADS, ids=str)
def test_gated_activations_and_gradients(
    kernels: MosaicRowKernels, sizes: tuple[int, ...], width: int
) -> None:
    used, rng = in_use(sizes), np.random.default_rng(0)
    u = jnp.asarray(rng.normal(scale=3, size=(SLOTS, 2, width)), jnp.bfloat16)
    g = jnp.asarray(rng.normal(size=(SLOTS, width)), jnp.bfloat16)
    u, g = u.at[used:].set(jnp.nan), g.at[used:].set(jnp.nan)
    counts = jnp.array(sizes, jnp.int32)
    out, vjp = jax.vjp(lambda u: kernels.gated(u, counts, "swiglu"), u)
    (d_u,) = vjp(g)
    gate, up, d_out = exact(u[:used, 0]), exact(u[:used, 1]), exact(g[:used])
    sigmoid = 1 / (1 + np.exp(-gate))
    for actual, expected in (
        (out, gate * sigmoid * up),
        (d_u[:, 0], d_out * up * sigmoid * (1 + gate * (1 - sigmoid))),
        (d_u[:, 1], d_out * gate * sigmoid),
    ):
        np.testing.assert_allclose(exact(actual[:used]), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", widths(384, 6016))
@pytest.mark.parametrize("sizes", LOADS, ids=str)
def test_rows_are_placed_and_weighted(
    kernels: MosaicRowKernels, sizes: tuple[int, ...], width: int, weighted: bool
) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(TOKENS, width)), jnp.bfloat16)
    weights = jnp.asarray(rng.uniform(size=(TOKENS, TOPK)), jnp.float32)
    source = np.full(SLOTS, TOKENS * TOPK, np.int32)
    expected, start = np.zeros((SLOTS, width)), 0
    for size in sizes:
        for row in range(start, start + size):
            token, choice = rng.integers(TOKENS), rng.integers(TOPK)
            source[row] = token * TOPK + choice
            expected[row] = exact(x[token]) * (float(weights[token, choice]) if weighted else 1)
        start += in_use((size,))
    out = kernels.place(
        x, jnp.asarray(source), jnp.array(sizes, jnp.int32), TOPK, weights if weighted else None
    )
    used = in_use(sizes)
    np.testing.assert_allclose(exact(out[:used]), expected[:used], rtol=2**-8 if weighted else 0)


def test_an_unfilled_slot_is_zero_whatever_the_rows_hold(kernels: MosaicRowKernels) -> None:
    source = jnp.full(ROW_TILE, 2, jnp.int32).at[0].set(0)
    x = jnp.full((2, 128), jnp.inf, jnp.bfloat16)
    out = kernels.place(x, source, jnp.array([1], jnp.int32), 1, jnp.ones((2, 1)))
    np.testing.assert_array_equal(exact(out[1:]), 0)
