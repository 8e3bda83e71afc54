"""The chunked output layer against a float64 softmax cross-entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.layers.cross_entropy import CrossEntropy, _peak_and_total
from jaxtron.mesh.axes import AXES
from jaxtron.parallel.gradient_sum import SummedWeight, Uses
from jaxtron.parallel.region import Region

REGION = Region(dict.fromkeys(AXES, 1), sequence_parallel=False)
VOCAB, PADDED, TOKENS, WIDTH = 11, 16, 13, 8


def numpy_loss(
    x: np.ndarray, weight: np.ndarray, labels: np.ndarray, token_weights: np.ndarray, z: float
) -> float:
    logits = x.astype(np.float64) @ weight[:VOCAB].astype(np.float64).T
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    nll = log_z - logits[np.arange(len(labels)), labels]
    return float(np.sum((nll + z * log_z**2) * token_weights))


@pytest.fixture
def arrays() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    weight = rng.normal(size=(PADDED, WIDTH)).astype(np.float32)
    labels = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    token_weights = (rng.random(TOKENS) < 0.7) * rng.random(TOKENS)
    return x, weight, labels, token_weights.astype(np.float32)


@pytest.mark.parametrize("z", [0.0, 0.01])
@pytest.mark.parametrize("chunk", [1, 5, 13, 64])
def test_loss_is_the_weighted_cross_entropy_for_any_chunk(
    arrays: tuple[np.ndarray, ...], z: float, chunk: int
) -> None:
    ce = CrossEntropy(REGION, VOCAB, z_loss_coeff=z, chunk_tokens=chunk)
    objective, loss = ce(*arrays)
    np.testing.assert_allclose(objective, numpy_loss(*arrays, z), rtol=1e-6)
    np.testing.assert_allclose(loss, numpy_loss(*arrays, 0.0), rtol=1e-6)


@pytest.mark.parametrize("z", [0.0, 0.01])
def test_gradients_are_the_slopes_of_the_loss(arrays: tuple[np.ndarray, ...], z: float) -> None:
    x, weight, labels, token_weights = arrays
    ce = CrossEntropy(REGION, VOCAB, z_loss_coeff=z, chunk_tokens=4)
    gx, gw = jax.grad(lambda x, w: ce(x, w, labels, token_weights)[0], (0, 1))(x, weight)
    rng, eps = np.random.default_rng(1), 1e-6
    for target, gradient in ((0, gx), (1, gw)):
        direction = rng.normal(size=arrays[target].shape)

        def shifted(sign: int, target: int = target, direction: np.ndarray = direction) -> float:
            moved = [a.astype(np.float64) for a in (x, weight)]
            moved[target] = moved[target] + sign * eps * direction
            return numpy_loss(*moved, labels, token_weights, z)

        slope = (shifted(1) - shifted(-1)) / (2 * eps)
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-4)


@pytest.mark.parametrize("chunk", [4, 13])
def test_a_weight_with_a_sum_gets_the_sum_with_its_gradient_added(
    arrays: tuple[np.ndarray, ...], chunk: int
) -> None:
    x, weight, labels, token_weights = arrays
    ce = CrossEntropy(REGION, VOCAB, z_loss_coeff=0.01, chunk_tokens=chunk)
    gx, gw = jax.grad(lambda x, w: ce(x, w, labels, token_weights)[0], (0, 1))(x, weight)
    total = np.random.default_rng(2).normal(size=weight.shape).astype(np.float32)
    gx_summed, after = jax.grad(
        lambda x, t: ce(
            x, SummedWeight(jnp.asarray(weight), t, Uses("output/weight")), labels, token_weights
        )[0],
        (0, 1),
    )(x, total)
    np.testing.assert_allclose(after, total + gw, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(gx_summed, gx)


def test_maximum_and_sum_in_one_pass() -> None:
    logits = np.random.default_rng(0).normal(size=(6, 301)).astype(np.float32) * 20
    logits[1, 7:] = -np.inf
    logits[2] = -np.inf
    logits[3, 5], logits[4, 6] = np.nan, np.inf
    peak, total = jax.jit(_peak_and_total)(logits)
    finite = logits[[0, 1, 5]]
    np.testing.assert_array_equal(peak[np.array([0, 1, 5])], finite.max(1))
    expected = np.exp(finite.astype(np.float64) - finite.max(1, keepdims=True)).sum(1)
    np.testing.assert_allclose(total[np.array([0, 1, 5])], expected, rtol=1e-6)
    assert peak[2] == np.finfo(np.float32).min and total[2] == 301
    assert np.isnan(total[3]) and np.isposinf(peak[4])


@pytest.mark.parametrize(
    ("tokens", "rows", "chunk"),
    [
        (32768, 32768, 4096),
        (8192, 151936, 4096),  # 2.4 GiB of logits
        (8192, 262144, 2048),  # not more than 2.5 GiB: four chunks of at most 2560 tokens
        (32768, 8192, 16384),  # 512 MiB
        (100, 151936, 100),
        (5000, 32768, 2512),  # two chunks alike, a multiple of 16
    ],
)
def test_tokens_of_a_chunk(tokens: int, rows: int, chunk: int) -> None:
    assert CrossEntropy(REGION, VOCAB).chunk(tokens, rows) == chunk
    assert CrossEntropy(REGION, VOCAB, chunk_tokens=7).chunk(14, rows) == 7


def test_padding_rows_of_the_vocabulary_have_no_gradient(arrays: tuple[np.ndarray, ...]) -> None:
    x, weight, labels, token_weights = arrays
    ce = CrossEntropy(REGION, VOCAB)
    gw = jax.grad(lambda w: ce(x, w, labels, token_weights)[0])(weight)
    assert np.all(np.asarray(gw)[VOCAB:] == 0)
    assert np.any(np.asarray(gw)[:VOCAB] != 0)


def test_zero_logits_give_the_logarithm_of_the_vocabulary() -> None:
    x, weight = np.zeros((4, WIDTH), np.float32), np.ones((PADDED, WIDTH), np.float32)
    _, loss = CrossEntropy(REGION, VOCAB)(
        x, weight, np.arange(4, dtype=np.int32), np.full(4, 0.25, np.float32)
    )
    np.testing.assert_allclose(loss, np.log(VOCAB), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masked_tokens_do_not_leak_whatever_their_values(
    arrays: tuple[np.ndarray, ...], bad: float
) -> None:
    x, weight, labels, token_weights = arrays
    token_weights[3] = 0
    clean = jax.value_and_grad(
        lambda x, w: CrossEntropy(REGION, VOCAB)(x, w, labels, token_weights)[0], (0, 1)
    )
    expected = clean(jnp.asarray(x), jnp.asarray(weight))
    x = x.copy()
    x[3] = bad
    actual = clean(jnp.asarray(x), jnp.asarray(weight))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e)
    assert np.all(np.asarray(actual[1][0])[3] == 0)


def test_chunks_keep_the_logits_of_all_tokens_out_of_memory() -> None:
    """Temporary bytes of loss and gradients: below half of the logits of 4,096 tokens."""
    tokens, vocab, width = 4096, 2048, 16
    shapes = (
        jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )

    def temporary(chunk: int) -> int:
        ce = CrossEntropy(REGION, vocab, chunk_tokens=chunk)
        gradients = jax.grad(lambda *a: ce(*a)[0], argnums=(0, 1))
        return int(jax.jit(gradients).lower(*shapes).compile().memory_analysis().temp_size_in_bytes)

    logits = 4 * tokens * vocab
    assert temporary(tokens) > logits
    assert temporary(256) < logits / 2
