"""Products of activations with weights: values, derivatives, and what the backward pass keeps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtron.layers.linear import linear

RNG = np.random.default_rng(0)


def draw(*shape: int) -> Any:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def last_two(w: jax.Array, axis: int) -> jax.Array:
    return jax.lax.slice_in_dim(w, w.shape[axis] - 2, w.shape[axis], axis=axis)


def test_joined_products_equal_separate_ones() -> None:
    x, query, key_value = draw(2, 3, 8), draw(8, 4, 2), draw(8, 2, 4, 2)
    cotangents = draw(2, 3, 4, 2), draw(2, 3, 2, 2, 2)
    outputs, vjp = jax.vjp(
        lambda x, ws: linear(x, ws, own=[None, (last_two, 1)]), x, [query, key_value]
    )
    dx, (dquery, dkey_value) = vjp(cotangents)
    own = np.asarray(key_value)[:, :, 2:]
    gq, gkv = map(np.asarray, cotangents)
    np.testing.assert_allclose(outputs[0], np.einsum("bsh,hnd->bsnd", x, query), atol=1e-5)
    np.testing.assert_allclose(outputs[1], np.einsum("bsh,hcgd->bscgd", x, own), atol=1e-5)
    expected = np.einsum("bsnd,hnd->bsh", gq, query) + np.einsum("bscgd,hcgd->bsh", gkv, own)
    np.testing.assert_allclose(dx, expected, atol=1e-5)
    np.testing.assert_allclose(dquery, np.einsum("bsh,bsnd->hnd", x, gq), atol=1e-5)
    np.testing.assert_allclose(
        dkey_value[:, :, 2:], np.einsum("bsh,bscgd->hcgd", x, gkv), atol=1e-5
    )
    assert not np.any(np.asarray(dkey_value)[:, :, :2])


def test_several_input_dimensions_are_summed_over() -> None:
    x, w = draw(2, 3, 4, 2), draw(4, 2, 8)
    (y,) = linear(x, [w], inputs=2)
    np.testing.assert_allclose(y, np.einsum("bsnd,ndh->bsh", x, w), atol=1e-5)


def test_backward_keeps_the_input_and_the_given_weights_by_identity() -> None:
    seen = []

    @jax.jit
    def forward(x: jax.Array, query: jax.Array, key_value: jax.Array) -> jax.Array:
        weights = [query, key_value]
        outputs, vjp = jax.vjp(lambda x, ws: linear(x, ws, own=[None, (last_two, 1)]), x, weights)
        given = (x, query, key_value)
        seen.append([any(leaf is g for g in given) for leaf in jax.tree.leaves(vjp)])
        return outputs[0]

    forward(draw(2, 3, 8), draw(8, 4, 2), draw(8, 2, 4, 2))
    assert seen == [[True, True, True]]
