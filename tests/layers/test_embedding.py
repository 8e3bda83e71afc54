"""Lookup in a slice of the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtron.layers.embedding import rows_of
from jaxtron.parallel.gradient_sum import SummedWeight, Uses


def test_rows_outside_the_slice_are_zeros_and_get_no_gradient() -> None:
    weight = jnp.arange(1.0, 7.0).reshape(3, 2)
    index = jnp.array([[-1, 0, 2], [3, 100, -3]])
    rows, vjp = jax.vjp(lambda w: rows_of(w, index), weight)
    expected = np.zeros((2, 3, 2), np.float32)
    expected[0, 1], expected[0, 2] = (1, 2), (5, 6)
    np.testing.assert_array_equal(rows, expected)
    (gradient,) = vjp(jnp.ones_like(rows))
    np.testing.assert_array_equal(gradient, [[1, 1], [0, 0], [1, 1]])


def test_a_token_that_comes_a_thousand_times_counts_a_thousand_times_in_bf16() -> None:
    """Summed in bf16 it would stop at 256."""
    weight = jnp.zeros((4, 2), jnp.bfloat16)
    index = jnp.full((1, 1000), 3)
    (gradient,) = jax.vjp(lambda w: rows_of(w, index), weight)[1](
        jnp.ones((1, 1000, 2), "bfloat16")
    )
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient.astype(jnp.float32)[3], [1000, 1000])


def test_a_weight_with_a_sum_gets_the_sum_with_its_gradient_added() -> None:
    weight, total = jnp.zeros((3, 2), jnp.bfloat16), jnp.arange(6.0).reshape(3, 2)
    index = jnp.array([[-1, 0, 2], [2, 3, 2]])
    rows, vjp = jax.vjp(
        lambda t: rows_of(SummedWeight(weight, t, Uses("embedding/word")), index), total
    )
    assert rows.dtype == jnp.bfloat16
    (after,) = vjp(jnp.full_like(rows, 2))
    np.testing.assert_array_equal(after, [[0 + 2, 1 + 2], [2, 3], [4 + 6, 5 + 6]])
