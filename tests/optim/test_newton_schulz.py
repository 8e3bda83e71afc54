import numpy as np
import pytest

from jaxtron.optim.newton_schulz import orthogonalize

QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5


def on_singular_values(x: np.ndarray, steps: list) -> np.ndarray:
    """The same polynomial, applied to the singular values of each matrix in float64."""
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / np.sqrt(np.sum(s**2, axis=-1, keepdims=True))
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return u * s[:, None, :] @ vt


@pytest.mark.parametrize(("name", "steps"), [("quintic", QUINTIC), ("simple", SIMPLE)])
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 12), (2, 12, 5)])
def test_it_is_the_polynomial_of_the_singular_values(name: str, steps: list, shape: tuple):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    got = orthogonalize(x, steps=5, coefficient_type=name, precision="highest")
    np.testing.assert_allclose(got, on_singular_values(x, steps), atol=2e-5)


@pytest.mark.parametrize(("precision", "off"), [("medium", 0.05), ("high", 1e-3)])
def test_the_result_is_nearly_orthogonal_whatever_the_scale_and_the_precision(
    precision: str, off: float
):
    x = 1e-5 * np.random.default_rng(1).normal(size=(2, 16, 40)).astype(np.float32)
    got = orthogonalize(x, steps=5, coefficient_type="quintic", precision=precision)
    singular = np.linalg.svd(np.asarray(got), compute_uv=False)
    assert np.all((singular > 0.7) & (singular < 1.3))
    np.testing.assert_allclose(got, on_singular_values(x, QUINTIC), atol=off)


def test_a_matrix_of_zeros_stays_zero():
    got = orthogonalize(
        np.zeros((1, 3, 4), np.float32), steps=5, coefficient_type="quintic", precision="medium"
    )
    np.testing.assert_array_equal(got, 0.0)
