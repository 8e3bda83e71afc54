"""FP8 products against NumPy: values, derivatives, what is kept for the backward pass."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.layers.linear import linear, linear_of_parts
from jaxtron.precision.fp8_weight import Fp8Gradient, Fp8Recipe, Fp8Site, Fp8Weight
from jaxtron.precision.quantise import E4M3, E5M2, amax, quantise, scale_of
from tests.precision import emulation

RNG = np.random.default_rng(0)
FORMATS = {"hybrid": (E5M2, "e5m2"), "e4m3": (E4M3, "e4m3")}


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def fp8_weights(
    arrays: list[np.ndarray], fmt: str = "hybrid", inputs: int = 1, transposed: bool = True
) -> list[Fp8Weight]:
    recipe = Fp8Recipe(forward=E4M3, backward=FORMATS[fmt][0], backend="xla", on_gpu=False)
    site = Fp8Site("test", inputs, False, recipe, (), ())
    scale = scale_of(jnp.max(jnp.stack([amax(jnp.asarray(a)) for a in arrays])), E4M3)

    def weight(a: np.ndarray) -> Fp8Weight:
        bits = quantise(jnp.asarray(a), scale, E4M3)
        dims = (*range(inputs, a.ndim), *range(inputs))
        turned = jnp.transpose(bits, dims) if transposed else None
        return Fp8Weight(bits, turned, scale, None, Fp8Gradient(jnp.zeros(a.shape), None), site)

    return [weight(a) for a in arrays]


def run(x: Any, weights: list[Fp8Weight], cotangents: Any, **how: Any) -> Any:
    """Outputs, the input's derivative and the weights'."""

    def apply(x: jax.Array, gradients: list[Fp8Gradient]) -> tuple[jax.Array, ...]:
        pairs = zip(weights, gradients, strict=True)
        return linear(x, [dataclasses.replace(w, gradient=g) for w, g in pairs], **how)

    outputs, vjp = jax.vjp(apply, jnp.asarray(x), [w.gradient for w in weights])
    dx, dw = vjp(tuple(map(jnp.asarray, cotangents)))
    return outputs, dx, [d.weight for d in dw]


def error(actual: Any, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected)) / float(
        np.linalg.norm(expected)
    )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("transposed", [True, False])
def test_output_and_derivatives_equal_numpy(fmt: str, transposed: bool) -> None:
    x, w, g = draw(2, 3, 8), draw(8, 2, 6), draw(2, 3, 2, 6) * 1e-6
    (y,), dx, (dw,) = run(x, fp8_weights([w], fmt, transposed=transposed), [g])
    ey, edx, edw = emulation.linear(
        x.reshape(6, 8), w.reshape(8, 12), g.reshape(6, 12), FORMATS[fmt][1]
    )
    assert error(y, ey.reshape(2, 3, 2, 6)) < 1e-6
    assert error(dx, edx.reshape(2, 3, 8)) < 1e-6
    assert error(dw, edw.reshape(8, 2, 6)) < 1e-6
    # and FP8 it is: against exact arithmetic the error is that of 3 mantissa bits
    assert 1e-2 < error(y, np.einsum("bsh,hcf->bscf", x, w)) < 6e-2


def test_joined_weights_share_a_scale_and_are_used_in_part() -> None:
    x, query, key_value = draw(2, 3, 8), draw(8, 4, 2), draw(8, 2, 4, 2) * 3
    gq, gkv = draw(2, 3, 4, 2), draw(2, 3, 2, 2, 2)

    def last_two(w: jax.Array, axis: int) -> jax.Array:
        return jax.lax.slice_in_dim(w, w.shape[axis] - 2, w.shape[axis], axis=axis)

    weights = fp8_weights([query, key_value])
    outputs, dx, (dq, dkv) = run(x, weights, [gq, gkv], own=[None, (last_two, 1)])
    s = emulation.scale(np.max(np.abs(key_value)), "e4m3")
    joined = np.concatenate([query.reshape(8, 8), key_value[:, :, 2:].reshape(8, 8)], 1)
    g = np.concatenate([gq.reshape(6, 8), gkv.reshape(6, 8)], 1)
    qx, qw = emulation.quantised(x.reshape(6, 8), "e4m3"), emulation.quantised(joined, "e4m3", s)
    qg = emulation.quantised(g, "e5m2")
    y, dw = qx @ qw, qx.T @ qg
    assert error(outputs[0], y[:, :8].reshape(2, 3, 4, 2)) < 1e-6
    assert error(outputs[1], y[:, 8:].reshape(2, 3, 2, 2, 2)) < 1e-6
    assert error(dx, (qg @ qw.T).reshape(2, 3, 8)) < 1e-6
    assert error(dq, dw[:, :8].reshape(8, 4, 2)) < 1e-6
    assert error(dkv[:, :, 2:], dw[:, 8:].reshape(8, 2, 2, 2)) < 1e-6
    assert not np.any(np.asarray(dkv)[:, :, :2])


@pytest.mark.parametrize("given", [None, [2.0**-7, 2.0**-24]], ids=["current", "delayed"])
def test_parts_have_one_scale_and_are_measured_together(given: list[float] | None) -> None:
    x, w, g = draw(6, 8), draw(8, 12), draw(6, 12) * 1e-6
    x[4, 2], g[1, 3] = 9.0, -8e-6  # the largest of the input behind, that of the gradient before
    (weight,) = fp8_weights([w])
    if given is not None:
        empty = Fp8Gradient(weight.gradient.weight, jnp.zeros(2))
        weight = dataclasses.replace(weight, scales=jnp.asarray(given), gradient=empty)

    def apply(parts: list[jax.Array], gradient: Fp8Gradient) -> list[jax.Array]:
        products = linear_of_parts(parts, [dataclasses.replace(weight, gradient=gradient)])
        return [y for (y,) in products]

    def at(cuts: list[int]) -> Any:
        parts, cotangents = (
            [jnp.asarray(part) for part in np.split(whole, cuts)] for whole in (x, g)
        )
        ys, vjp = jax.vjp(apply, parts, weight.gradient)
        dxs, d = vjp(cotangents)
        return jnp.concatenate(ys), jnp.concatenate(dxs), d

    (y, dx, d), (y_whole, dx_whole, d_whole) = at([2, 3]), at([])
    np.testing.assert_array_equal(y, y_whole)
    np.testing.assert_array_equal(dx, dx_whole)
    assert error(d.weight, d_whole.weight) < 1e-6
    if given is not None:
        np.testing.assert_array_equal(d.amax, np.float32([9.0, 8e-6]))


def test_several_input_dimensions() -> None:
    x, w, g = draw(2, 3, 4, 2), draw(4, 2, 8), draw(2, 3, 8)
    (y,), dx, (dw,) = run(x, fp8_weights([w], inputs=2), [g], inputs=2)
    ey, edx, edw = emulation.linear(x.reshape(6, 8), w.reshape(8, 8), g.reshape(6, 8), "e5m2")
    assert error(y, ey.reshape(2, 3, 8)) < 1e-6
    assert error(dx, edx.reshape(2, 3, 4, 2)) < 1e-6
    assert error(dw, edw.reshape(4, 2, 8)) < 1e-6


def test_zero_input_and_zero_gradient_give_zeros() -> None:
    w = draw(8, 6)
    (y,), dx, (dw,) = run(np.zeros((4, 8), np.float32), fp8_weights([w]), [np.zeros((4, 6))])
    assert not np.any(np.asarray(y)) and not np.any(np.asarray(dx)) and not np.any(np.asarray(dw))


def test_an_infinity_reaches_the_output() -> None:
    x = draw(4, 8)
    x[2, 3] = np.inf
    (y,), _, _ = run(x, fp8_weights([draw(8, 6)]), [draw(4, 6)])
    assert np.isnan(np.asarray(y)).all()


def test_backward_keeps_the_input_in_fp8_and_the_weights_by_identity() -> None:
    weights = fp8_weights([draw(8, 6), draw(8, 4)])
    x = jnp.asarray(draw(4, 8), jnp.bfloat16)
    kept = []

    @jax.jit
    def forward(x: jax.Array, weights: list[Fp8Weight]) -> jax.Array:
        def apply(x: jax.Array, gradients: list[Fp8Gradient]) -> tuple[jax.Array, ...]:
            pairs = zip(weights, gradients, strict=True)
            return linear(x, [dataclasses.replace(w, gradient=g) for w, g in pairs])

        outputs, vjp = jax.vjp(apply, x, [w.gradient for w in weights])
        given = jax.tree.leaves(weights)
        kept.extend(
            (leaf.dtype.name, leaf.shape)
            for leaf in jax.tree.leaves(vjp)
            if not any(leaf is g for g in given)
        )
        return outputs[0]

    forward(x, weights)
    assert sorted(kept) == [("float32", ()), ("uint8", (8, 4))]


def test_a_layer_under_checkpoint_keeps_values_above_240() -> None:
    # jax.checkpoint rounds float8_e4m3fn residuals as if the format had infinities
    x, w = draw(4, 8), draw(8, 6)
    (weight,) = fp8_weights([w])

    def loss(x: jax.Array) -> jax.Array:
        (y,) = linear(x, [weight])
        return jnp.sum(y * y)

    policy = jax.checkpoint_policies.everything_saveable
    saved = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(jnp.asarray(x))
    np.testing.assert_array_equal(saved, jax.jit(jax.grad(loss))(jnp.asarray(x)))
    assert np.isfinite(np.asarray(saved)).all()
