"""Hopper kernels of the gated MLP against fp32 products; on a GPU or in Pallas's interpreter."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.kernels.gated_mlp_hopper import d_gate_up, gate_up
from jaxtron.kernels.grouped_matmul_hopper import multiprocessors, plgpu_module

# tokens, hidden, inner: tiles of columns beside and bands of rows below one another, odd numbers
SHAPES = [(256, 320, 256), (2304, 256, 768), (4352, 448, 512)]


@contextlib.contextmanager
def interpreter() -> Iterator[None]:
    """Every thread of the kernels is a thread of this process, and races are errors."""
    plgpu = plgpu_module()
    if not hasattr(plgpu, "force_gpu_interpret_mode"):
        pytest.skip("this JAX cannot interpret kernels of Mosaic GPU")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def check(shape: tuple[int, int, int], blocks: int) -> None:
    tokens, hidden, inner = shape
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda i, *s: jax.random.normal(keys[i], s).astype(jnp.bfloat16)  # noqa: E731
    x, up, down = draw(0, tokens, hidden), draw(1, hidden, 2, inner), draw(2, inner, hidden)
    up, down = up * hidden**-0.5, down * hidden**-0.5
    u, act = gate_up(x, up, blocks=blocks)
    d_u = d_gate_up(draw(3, tokens, hidden), down, u, blocks=blocks)
    x, g, up, down, out = (
        np.asarray(a, np.float32) for a in (x, draw(3, tokens, hidden), up, down, u)
    )
    gate, value = out[:, 0], out[:, 1]
    sigmoid, d_act = 1 / (1 + np.exp(-gate)), g @ down.T
    for actual, expected in (
        (out, np.einsum("mh,hpf->mpf", x, up)),
        (act, gate * sigmoid * value),
        (d_u[:, 0], d_act * value * sigmoid * (1 + gate * (1 - sigmoid))),
        (d_u[:, 1], d_act * gate * sigmoid),
    ):
        error = np.abs(np.asarray(actual, np.float32) - expected)
        assert np.max(error / (np.abs(expected) + 0.02)) <= 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_compute_the_products_and_swiglu(shape: tuple[int, int, int]) -> None:
    check(shape, multiprocessors())


@pytest.mark.slow
def test_kernels_have_no_races() -> None:
    with interpreter():
        check(SHAPES[0], 4)
