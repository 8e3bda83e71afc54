"""Products of experts in FP8 against every expert's product of rounded numbers in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtron.errors import ConfigError
from jaxtron.kernels.grouped_matmul import choose_grouped_matmul
from jaxtron.kernels.grouped_matmul_spec import GroupedMatmulSpec
from jaxtron.kernels.grouped_matmul_xla import XlaFp8GroupedMatmul, XlaGroupedMatmul
from jaxtron.precision.fp8_experts import fp8_experts
from jaxtron.precision.fp8_weight import Fp8Gradient, Fp8Recipe, Fp8Site, Fp8Weight
from jaxtron.precision.quantise import quantise

SIZES, TILE = [3, 0, 6], 4
STARTS, SLOTS, INNER, OUT = [0, 4, 4], 16, 8, (2, 3)


class InTiles(XlaGroupedMatmul):
    """Lays groups out in tiles and leaves NaN behind the last one, as the Hopper kernels may."""

    row_tile = TILE

    class fp8(XlaFp8GroupedMatmul):
        @staticmethod
        def rows_times_weights(rows, weights, sizes, scale, dtype):
            reserved = (sizes + TILE - 1) // TILE * TILE
            out = XlaFp8GroupedMatmul().rows_times_weights(rows, weights, reserved, scale, dtype)
            return jnp.where(jnp.arange(SLOTS)[:, None] < jnp.sum(reserved), out, jnp.nan)

        @staticmethod
        def rows_times_rows(a, b, sizes, scale):
            reserved = (sizes + TILE - 1) // TILE * TILE
            return XlaFp8GroupedMatmul().rows_times_rows(a, b, reserved, scale)


def rounded(x: np.ndarray, dtype: Any) -> tuple[np.ndarray, float]:
    """What FP8 keeps of ``x``, and the scale (a bf16 number)."""
    exact = np.float32(np.abs(x).max() / float(ml_dtypes.finfo(dtype).max))
    scale = float(exact.astype(ml_dtypes.bfloat16))
    return (x / scale).astype(dtype).astype(np.float64) * scale, scale


def in_slots(rng: np.random.Generator, width: int) -> np.ndarray:
    """Random rows where ``SIZES`` has some, zeros up to the end of a tile, NaN behind."""
    x = np.zeros((SLOTS, width), np.float32)
    for start, size in zip(STARTS, SIZES, strict=True):
        x[start : start + size] = rng.normal(size=(size, width))
    x[12:] = np.nan
    return x


@pytest.mark.parametrize("keeps_transposed", [True, False])
def test_products_and_gradients_are_those_of_rounded_operands(keeps_transposed: bool) -> None:
    rng = np.random.default_rng(0)
    x, g = in_slots(rng, INNER), in_slots(rng, 6)
    w = rng.normal(size=(3, INNER, *OUT)).astype(np.float32)
    (x8, _), (g8, _) = (
        rounded(x[:12], ml_dtypes.float8_e4m3fn),
        rounded(g[:12], ml_dtypes.float8_e5m2),
    )
    w8, scale = rounded(w, ml_dtypes.float8_e4m3fn)
    bits = quantise(jnp.asarray(w), jnp.float32(scale), jnp.float8_e4m3fn)
    recipe = Fp8Recipe(jnp.float8_e4m3fn, jnp.float8_e5m2, "xla", False)
    weight = Fp8Weight(
        values=bits,
        transposed=jnp.transpose(bits, (0, 2, 3, 1)) if keeps_transposed else None,
        scale=jnp.float32(scale),
        scales=None,
        gradient=Fp8Gradient(jnp.zeros(w.shape), None),
        site=Fp8Site("moe/experts/up", 1, True, recipe, (), ()),
    )
    kernel = InTiles()

    def product(rows: jax.Array, gradient: Fp8Gradient) -> jax.Array:
        differentiated = Fp8Weight(
            weight.values, weight.transposed, weight.scale, None, gradient, weight.site
        )
        return fp8_experts(rows, differentiated, jnp.array(SIZES, jnp.int32), kernel)

    y, vjp = jax.vjp(product, jnp.asarray(x), weight.gradient)
    d_x, d_w = vjp(jnp.asarray(g))
    for expert, (start, size) in enumerate(zip(STARTS, SIZES, strict=True)):
        rows, matrix = slice(start, start + size), w8[expert].reshape(INNER, 6)
        np.testing.assert_allclose(y[rows], x8[rows] @ matrix, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(d_x[rows], g8[rows] @ matrix.T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            d_w.weight[expert].reshape(INNER, 6), x8[rows].T @ g8[rows], rtol=1e-5, atol=1e-5
        )


def test_kernels_without_fp8_are_refused_with_what_to_do() -> None:
    spec = GroupedMatmulSpec(256, 2, 128, 128, jnp.dtype(jnp.bfloat16), 128, 128, fp8=True)
    assert choose_grouped_matmul("auto", spec, "cpu").name == "xla"
    with pytest.raises(ConfigError, match="fp8_experts to false"):
        choose_grouped_matmul("bucketed", spec, "cpu")
