"""FP8 products in hardware: the same numbers as NumPy's, and FP8 GEMMs in the compiled program."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtron.errors import ConfigError
from jaxtron.layers.linear import linear
from jaxtron.precision.fp8_te import require_transformer_engine
from jaxtron.precision.fp8_weight import Fp8Gradient, Fp8Recipe, Fp8Site, Fp8Weight
from jaxtron.precision.quantise import E4M3, E5M2, amax, quantise, scale_of
from tests.precision import emulation

pytestmark = pytest.mark.gpu

M, K, N = 256, 128, 512


def bf16(*shape: int, seed: int) -> np.ndarray:
    """Random numbers that bf16 holds, as fp32."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)
    return x.astype(np.float32)


def error(actual: Any, expected: np.ndarray) -> float:
    actual = np.asarray(actual, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("backend", ["xla", "te"])
@pytest.mark.parametrize("backward", ["e5m2", "e4m3"])
@pytest.mark.parametrize("given", [False, True], ids=["current", "delayed"])
def test_products_equal_numpy_and_are_fp8_in_the_program(
    given: bool, backward: str, backend: Any
) -> None:
    """With scales of the tensors themselves, and with given ones that some values exceed."""
    if backend == "te":
        try:
            require_transformer_engine(jax.devices()[0].platform)
        except ConfigError as missing:
            pytest.skip(str(missing))
    x, w, g = bf16(M, K, seed=0), bf16(K, N, seed=1), bf16(M, N, seed=2) * 2.0**-20
    fmt = E5M2 if backward == "e5m2" else E4M3
    site = Fp8Site("test", 1, False, Fp8Recipe(E4M3, fmt, backend, on_gpu=True), (), ())
    by_x, by_g = np.float32(2.0**-8), np.float32(2.0**-34 if backward == "e5m2" else 2.0**-27)

    def products(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        scale = scale_of(amax(w), E4M3)
        bits = quantise(w, scale, E4M3)
        scales, nothing = (jnp.stack([by_x, by_g]), jnp.zeros(2)) if given else (None, None)
        gradient = Fp8Gradient(jnp.zeros((K, N)), nothing)
        weight = Fp8Weight(bits, bits.T, scale, scales, gradient, site)
        (y,), vjp = jax.vjp(
            lambda x, gradient: linear(x, [dataclasses.replace(weight, gradient=gradient)]),
            x,
            weight.gradient,
        )
        dx, dw = vjp((g,))
        return (y, dx, dw.weight), dw.amax

    arguments = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w), jnp.asarray(g, jnp.bfloat16)
    with jax.default_matmul_precision("default"):
        # as jaxtron sets it on Hopper (launch/xla_flags.py)
        options = {"xla_gpu_enable_triton_gemm": False}
        compiled = jax.jit(products).lower(*arguments).compile(options)
    results, met = compiled(*arguments)
    expected = emulation.linear(x, w, g, backward)
    if given:
        qx, qg = emulation.quantised(x, "e4m3", by_x), emulation.quantised(g, backward, by_g)
        assert np.abs(qx).max() < np.abs(x).max() and np.abs(qg).max() < np.abs(g).max()
        qw = emulation.quantised(w, "e4m3")
        expected = qx @ qw, qg @ qw.T, qx.T @ qg
        np.testing.assert_array_equal(met, [np.abs(x).max(), np.abs(g).max()])
    for actual, wanted in zip(results, expected, strict=True):
        assert error(actual.astype(jnp.float32), wanted) < 2e-3
    calls = re.findall(r'custom_call_target="(__cublas[^"]*)"', compiled.as_text())
    assert calls == (["__cublas$lt$matmul$f8"] * 3 if backend == "xla" else [])
    if backend == "te":
        assert len(re.findall("te_gemm", compiled.as_text())) >= 3
