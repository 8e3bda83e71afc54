import dataclasses
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.errors import ConfigError
from jaxtron.kernels import query_blocks
from jaxtron.kernels.attention import ATTENTION_BACKENDS, choose_backend, dot_product_attention
from jaxtron.kernels.attention_spec import AttentionSpec
from jaxtron.layers.dropout import AttentionDropout, dropout_key
from jaxtron.log_once import log_once

from .reference import attention, attention_gradients, visible_keys

XLA = ATTENTION_BACKENDS["xla"]
SEGMENTS = np.array([[0] * 11, [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3]], np.int32)


def random_inputs(length: int = 11, heads: int = 4, groups: int = 2, keys: int | None = None):
    rng = np.random.default_rng(length + heads)
    shapes = [(2, length, heads, 6), (2, keys or length, groups, 6), (2, keys or length, groups, 6)]
    return [rng.normal(size=shape).astype(np.float32) for shape in (*shapes, shapes[0])]


CASES = {
    "full": {"causal": False, "window": None, "segments": None},
    "causal": {"causal": True, "window": None, "segments": None},
    "window": {"causal": True, "window": 3, "segments": None},
    "window 1": {"causal": True, "window": 1, "segments": None},
    "documents": {"causal": True, "window": None, "segments": SEGMENTS},
    "documents both ways": {"causal": False, "window": None, "segments": SEGMENTS},
    "documents and window": {"causal": True, "window": 2, "segments": SEGMENTS},
}


@pytest.mark.parametrize(
    ("case", "groups", "blocked"),
    [
        *((case, 2, False) for case in CASES),
        ("causal", 4, False),
        ("causal", 1, False),
        ("documents and window", 2, True),
        ("full", 1, True),
    ],
)
def test_xla_output_and_gradients_equal_the_float64_reference(
    case: str, groups: int, blocked: bool, monkeypatch: pytest.MonkeyPatch
):
    if blocked:  # 2 rows x 4 heads x 11 keys x 4 bytes x 4 queries: blocks of 4, 4 and 3
        monkeypatch.setattr(query_blocks, "MAX_SCORE_BYTES", 352 * 4)
    options = CASES[case]
    q, k, v, dout = random_inputs(groups=groups)
    visible = np.stack(
        [
            visible_keys(
                11,
                11,
                options["causal"],
                options["window"],
                None if options["segments"] is None else options["segments"][row],
            )
            for row in range(2)
        ]
    )

    def loss(q, k, v):
        out = dot_product_attention(
            q,
            k,
            v,
            scale=0.4,
            causal=options["causal"],
            window=options["window"],
            segment_ids=options["segments"],
            backend=XLA,
        )
        return jnp.sum(out * dout), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    np.testing.assert_allclose(out, attention(q, k, v, 0.4, visible), atol=3e-6)
    for got, want in zip(gradients, attention_gradients(q, k, v, 0.4, visible, dout)):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_cross_attention_takes_another_number_of_keys_with_their_own_segments():
    q, k, v, _ = random_inputs(length=5, keys=7)
    segments = np.array([[0, 0, 1, 1, 2]] * 2, np.int32)
    key_segments = np.array([[0, 0, 0, 1, 1, 1, 3]] * 2, np.int32)
    out = dot_product_attention(
        q,
        k,
        v,
        scale=1.0,
        causal=False,
        segment_ids=segments,
        key_segment_ids=key_segments,
        backend=XLA,
    )
    visible = segments[:, :, None] == key_segments[:, None, :]
    np.testing.assert_allclose(out, attention(q, k, v, 1.0, visible), atol=3e-6)


def test_query_that_sees_no_key_gives_zeros_and_finite_gradients():
    q, k, v, dout = random_inputs()
    segments = np.zeros((2, 11), np.int32)
    segments[:, 4] = 9
    keys = np.zeros((2, 11), np.int32)

    def loss(q, k, v):
        out = dot_product_attention(
            q,
            k,
            v,
            scale=1.0,
            causal=True,
            segment_ids=segments,
            key_segment_ids=keys,
            backend=XLA,
        )
        return jnp.sum(out * dout), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    np.testing.assert_array_equal(out[:, 4], 0.0)
    assert np.abs(out[:, 5]).min() > 0
    np.testing.assert_array_equal(gradients[0][:, 4], 0.0)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_tokens_of_another_document_have_exactly_no_influence():
    q, k, v, _ = random_inputs()
    run = partial(dot_product_attention, scale=1.0, causal=True, segment_ids=SEGMENTS, backend=XLA)
    changed_k, changed_v = k.copy(), v.copy()
    changed_k[1, :3], changed_v[1, :3] = 50.0, -1e4
    before, after = run(q, k, v), run(q, changed_k, changed_v)
    np.testing.assert_array_equal(before[1, 3:], after[1, 3:])
    assert np.abs(before[1, :3] - after[1, :3]).max() > 1


def test_a_packed_document_equals_the_document_alone():
    q, k, v, _ = random_inputs()
    packed = dot_product_attention(
        q, k, v, scale=1.0, causal=True, segment_ids=SEGMENTS, backend=XLA
    )
    alone = dot_product_attention(
        q[1:, 3:7], k[1:, 3:7], v[1:, 3:7], scale=1.0, causal=True, backend=XLA
    )
    np.testing.assert_allclose(packed[1:, 3:7], alone, atol=1e-6)


def test_large_scores_do_not_overflow():
    q, k, v, _ = random_inputs()
    out = dot_product_attention(1e3 * q, 1e3 * k, v, scale=1.0, causal=True, backend=XLA)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[:, 0], np.repeat(v[:, 0], 2, axis=1), rtol=1e-6)


def test_bf16_keeps_its_dtype_and_takes_the_softmax_in_float32():
    q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in random_inputs())
    out = dot_product_attention(q, k, v, scale=0.4, causal=True, backend=XLA)
    assert out.dtype == jnp.bfloat16
    visible = np.tile(np.tri(11) > 0, (2, 1, 1))
    exact = attention(*(np.asarray(x, np.float64) for x in (q, k, v)), 0.4, visible)
    # Rounding of probabilities and of the output alone: 2 x 2**-9, on outputs of at most 3.
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.012)


def test_memory_of_a_long_row_does_not_hold_all_scores():
    spec = jax.ShapeDtypeStruct((1, 2048, 8, 8), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(dot_product_attention(q, k, v, scale=1.0, causal=True, backend=XLA))

    def temporary_bytes() -> int:
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(spec, spec, spec).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    all_scores = 4 * 8 * 2048 * 2048
    assert temporary_bytes() > all_scores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_blocks, "MAX_SCORE_BYTES", all_scores // 16)
        assert temporary_bytes() < all_scores / 2


def attention_dropout(**changes) -> AttentionDropout:
    positions = jnp.arange(11, dtype=jnp.int32)
    fields = {
        "key": dropout_key(1, 2, 3, "attention"),
        "rate": 0.4,
        "rows": jnp.array([8, 3], jnp.int32),
        "heads": jnp.arange(4, dtype=jnp.int32),
        "query_positions": positions,
        "key_positions": positions,
    }
    return AttentionDropout(**{**fields, **changes})


@pytest.mark.parametrize("blocked", [False, True])
def test_dropout_zeroes_the_probabilities_that_its_mask_names(
    blocked: bool, monkeypatch: pytest.MonkeyPatch
):
    if blocked:
        monkeypatch.setattr(query_blocks, "MAX_SCORE_BYTES", 352 * 4)
    q, k, _, _ = random_inputs()
    rate, dropout = 0.4, attention_dropout()
    # Values that are unit vectors show the probabilities themselves.
    v = np.broadcast_to(np.eye(11, dtype=np.float32)[None, :, None], (2, 11, 2, 11))
    run = partial(dot_product_attention, q, k, v, scale=0.4, causal=True, backend=XLA)
    plain, dropped = run(), run(dropout=dropout)
    kept = np.asarray(dropped) != 0
    np.testing.assert_allclose(dropped, np.where(kept, plain / (1 - rate), 0), rtol=1e-6)
    visible = np.asarray(plain) != 0
    assert 0.5 < kept[visible].mean() < 0.7
    mask = dropout.apply(jnp.ones((2, 4, 11, 11)), dropout.query_positions) > 0
    np.testing.assert_array_equal(kept, jnp.moveaxis(mask, 1, 2) & visible)


def test_dropout_of_attention_is_the_same_for_any_split_of_rows_heads_and_queries():
    whole = attention_dropout().apply(jnp.ones((2, 4, 11, 11)), jnp.arange(11))
    part = attention_dropout(
        rows=jnp.array([3]), heads=jnp.array([2, 3]), key_positions=jnp.arange(5, 11)
    ).apply(jnp.ones((1, 2, 3, 6)), jnp.arange(4, 7))
    np.testing.assert_array_equal(part, whole[1:, 2:, 4:7, 5:])
    assert len({whole[row, head].tobytes() for row in range(2) for head in range(4)}) == 8


SPEC = AttentionSpec(
    query_length=16,
    key_length=16,
    num_heads=4,
    num_query_groups=2,
    head_dim=64,
    dtype=jnp.dtype(jnp.bfloat16),
)


@pytest.mark.parametrize(
    ("changes", "platform", "reason"),
    [
        ({}, "cpu", "needs an NVIDIA GPU, the platform is cpu"),
        ({"dtype": jnp.dtype(jnp.float32)}, "gpu", "not float32"),
        ({"head_dim": 20}, "gpu", "head_dim 20"),
        ({"head_dim": 264}, "gpu", "head_dim 264"),
        ({"dropout": True}, "gpu", "dropout mask"),
        ({"deterministic": True}, "gpu", "adds in any order"),
        ({"segments": True, "query_length": 15, "key_length": 15}, "gpu", "even sequence length"),
        ({"segments": True, "key_segments": True}, "gpu", "segment ids of their own"),
    ],
)
def test_a_backend_that_refuses_says_why(
    changes: dict, platform: str, reason: str, caplog: pytest.LogCaptureFixture
):
    log_once.cache_clear()
    spec = dataclasses.replace(SPEC, **changes)
    with pytest.raises(ConfigError, match=f"attention_backend=cudnn.*{reason}.*auto or xla"):
        choose_backend("cudnn", spec, platform)
    with caplog.at_level(logging.INFO):
        assert choose_backend("auto", spec, platform).name == "xla"
        assert choose_backend("auto", spec, platform).name == "xla"
    assert len(caplog.records) == 1
    assert "cudnn refused" in caplog.text and reason in caplog.text


def test_auto_takes_cudnn_on_a_gpu_and_an_explicit_name_is_kept():
    assert choose_backend("auto", SPEC, "gpu").name == "cudnn"
    assert choose_backend("auto", dataclasses.replace(SPEC, segments=True), "gpu").name == "cudnn"
    assert choose_backend("xla", SPEC, "gpu").name == "xla"
    with pytest.raises(ConfigError, match="'flash'.*auto or one of mosaic_gpu, cudnn, xla"):
        choose_backend("flash", SPEC, "gpu")


def test_meaningless_combinations_are_refused():
    with pytest.raises(ConfigError, match="4 query heads and 3 key/value"):
        dataclasses.replace(SPEC, num_query_groups=3)
    with pytest.raises(ConfigError, match="window_size=4 needs causal"):
        dataclasses.replace(SPEC, causal=False, window=4)
    with pytest.raises(ConfigError, match="16 queries over 8 keys"):
        dataclasses.replace(SPEC, key_length=8)


def test_a_backend_never_ignores_an_argument_it_cannot_honour():
    q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in random_inputs())
    with pytest.raises(ConfigError, match="head_dim 6"):
        dot_product_attention(q, k, v, scale=1.0, causal=True, backend=ATTENTION_BACKENDS["cudnn"])
