"""cuDNN attention against the exact kernel on a GPU: ``pytest -m gpu tests/kernels``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.kernels.attention import ATTENTION_BACKENDS, choose_backend, dot_product_attention
from jaxtron.kernels.attention_spec import AttentionBackend, AttentionSpec

pytestmark = pytest.mark.gpu

LENGTH = 256


def segment_ids(documents: tuple[int, ...]) -> np.ndarray:
    """Random cuts of each row into the given numbers of documents."""
    rng = np.random.default_rng(5)
    cuts = [np.sort(rng.choice(np.arange(1, LENGTH), n - 1, replace=False)) for n in documents]
    rows = [np.searchsorted(cut, np.arange(LENGTH), side="right") for cut in cuts]
    return np.stack(rows).astype(np.int32)


CASES = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 37},
    "window 1": {"causal": True, "window": 1},
    "window as long as the row": {"causal": True, "window": LENGTH},
    "documents": {"causal": True, "segment_ids": segment_ids((1, 7, LENGTH))},
    "documents both ways": {"causal": False, "segment_ids": segment_ids((1, 7, LENGTH))},
    "documents and window": {"causal": True, "window": 20, "segment_ids": segment_ids((2, 5, 30))},
}


def inputs(heads: int, groups: int, head_dim: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    q, k = (3, LENGTH, heads, head_dim), (3, LENGTH, groups, head_dim)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in (q, k, k, q)]


def output_and_gradients(backend: AttentionBackend, arrays: list[jax.Array], case: dict):
    *qkv, dout = arrays

    def loss(q, k, v):
        out = dot_product_attention(q, k, v, scale=0.1, backend=backend, **case)
        return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32)), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return [np.asarray(x, np.float32) for x in (out, *gradients)]


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_cudnn_equals_the_exact_kernel_forward_and_backward(case: str, groups: int):
    arrays = inputs(4, groups, 64)
    got = output_and_gradients(ATTENTION_BACKENDS["cudnn"], arrays, CASES[case])
    exact = [x.astype(jnp.float32) for x in arrays]
    want = output_and_gradients(ATTENTION_BACKENDS["xla"], exact, CASES[case])
    for a, b in zip(got, want):
        assert np.isfinite(a).all()
        # bf16 rounds inputs of the products to 2**-9 relative; errors are judged against the
        # largest value, since small ones come from cancellation. The absolute part is for a window
        # of 1, whose gradients of queries and keys are 0.
        assert np.abs(a - b).max() < 0.01 * np.abs(b).max() + 1e-5


def test_cudnn_gives_other_documents_exactly_no_influence():
    q, k, v, _ = inputs(4, 2, 128)
    segments = segment_ids((1, 2, 9))
    first = segments[2] == 0
    assert first.any() and not first.all()

    def run(k, v):
        return dot_product_attention(
            q,
            k,
            v,
            scale=0.1,
            causal=True,
            segment_ids=segments,
            backend=ATTENTION_BACKENDS["cudnn"],
        )

    before = np.asarray(run(k, v), np.float32)
    changed = [x.at[2, first].set(30.0) for x in (k, v)]
    after = np.asarray(run(*changed), np.float32)
    np.testing.assert_array_equal(before[2, ~first], after[2, ~first])
    assert np.abs(before[2, first] - after[2, first]).max() > 1


@pytest.mark.parametrize("head_dim", [8, 72, 128, 256])
def test_auto_chooses_cudnn_where_it_works(head_dim: int):
    spec = AttentionSpec(
        query_length=LENGTH,
        key_length=LENGTH,
        num_heads=4,
        num_query_groups=2,
        head_dim=head_dim,
        dtype=jnp.dtype(jnp.bfloat16),
    )
    backend = choose_backend("auto", spec, jax.devices()[0].platform)
    hopper = float(jax.devices()[0].compute_capability) >= 9
    assert backend.name == ("cudnn" if hopper or head_dim <= 128 else "xla")
    results = output_and_gradients(backend, inputs(4, 2, head_dim), CASES["causal"])
    assert all(np.isfinite(x).all() for x in results)
