"""Casting to 8-bit floating point: saturation, scales, special values (O16)."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtron.precision.quantise import E4M3, E5M2, amax, quantise, scale_of, values_of
from tests.precision import emulation

ONE = jnp.float32(1)


def cast(x: object, scale: object = ONE, dtype: object = E4M3) -> np.ndarray:
    array = jnp.asarray(x, jnp.float32)
    return np.asarray(values_of(quantise(array, scale, dtype), dtype), np.float32)


def test_the_cast_saturates() -> None:
    assert list(cast([1000.0, 449.0, 460.0, -1000.0])) == [448, 448, 448, -448]
    assert list(cast([1e6, -1e6], dtype=E5M2)) == [57344, -57344]


def test_nan_is_not_hidden() -> None:
    assert np.isnan(cast([np.nan])).all()


@pytest.mark.parametrize(("dtype", "name"), [(E4M3, "e4m3"), (E5M2, "e5m2")])
def test_values_and_scale_equal_numpy(dtype: object, name: str) -> None:
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32) * 3e-5
    scale = scale_of(amax(jnp.asarray(x)), dtype)
    assert float(scale) == emulation.scale(np.max(np.abs(x)), name)
    expected = emulation.quantised(x, name)
    np.testing.assert_array_equal(cast(x, scale, dtype) * float(scale), expected.astype(np.float32))


def test_a_scale_is_a_bf16_number_near_amax_over_the_largest_value() -> None:
    for largest in (3.735372, 1e-30, 6e4):
        scale = float(scale_of(jnp.float32(largest), E4M3))
        assert scale == float(np.float32(scale).astype(ml_dtypes.bfloat16))
        assert scale == pytest.approx(largest / 448, rel=2**-8)


def test_a_tensor_of_zeros_has_scale_one_and_stays_zero() -> None:
    scale = scale_of(amax(jnp.zeros((4, 4))), E4M3)
    assert float(scale) == 1
    assert not cast(np.zeros(4), scale).any()


def test_the_smallest_numbers_do_not_make_infinities() -> None:
    x = np.full(4, 1.2e-38, np.float32)
    scale = scale_of(amax(jnp.asarray(x)), E4M3)
    assert np.isfinite(cast(x, scale)).all()


def test_infinity_makes_the_whole_tensor_nan() -> None:
    x = np.array([1.0, np.inf, -2.0], np.float32)
    scale = scale_of(amax(jnp.asarray(x)), E4M3)
    with np.errstate(invalid="ignore"):
        assert np.isnan(cast(x, scale) * np.asarray(scale)).all()
