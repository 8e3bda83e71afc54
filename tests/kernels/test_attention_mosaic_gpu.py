"""Packed rows by the Hopper kernels: what they are given, chosen for, and compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.errors import ConfigError
from jaxtron.kernels import attention_mosaic_gpu
from jaxtron.kernels.attention import ATTENTION_BACKENDS, choose_backend, dot_product_attention
from jaxtron.kernels.attention_block import BlockMask, merge
from jaxtron.kernels.attention_mosaic_gpu import visible_keys
from jaxtron.kernels.attention_spec import AttentionSpec
from jaxtron.layers.remat import by_name
from jaxtron.parallel.context.balance import cut_documents
from tests.kernels.reference import attention, attention_gradients
from tests.kernels.reference import visible_keys as written_out

SPEC = AttentionSpec(
    query_length=256,
    key_length=256,
    num_heads=4,
    num_query_groups=2,
    head_dim=128,
    dtype=jnp.dtype(jnp.bfloat16),
    segments=True,
)


def documents(*rows: tuple[int, ...]) -> np.ndarray:
    """Segment ids of rows of documents of these lengths; the numbers neither rise nor repeat."""
    numbers = np.arange(1, 1000, dtype=np.int32) * 389 % 1009  # 1009 is prime
    return np.stack([np.repeat(numbers[: len(lengths)], lengths) for lengths in rows])


def block(
    segments: np.ndarray | None, window: int | None, queries: np.ndarray, keys: np.ndarray
) -> BlockMask:
    """Mask between some places of a row."""
    return BlockMask(
        *(jnp.asarray(places, jnp.int32) for places in (queries, keys)),
        *(None if segments is None else jnp.asarray(segments[:, p]) for p in (queries, keys)),
        own_keys=queries is keys,
        window=window,
    )


def places(*chunks: int, size: int) -> np.ndarray:
    return np.concatenate([np.arange(size * chunk, size * (chunk + 1)) for chunk in chunks])


# chunks of queries and of keys: a row of one, a member's own two, earlier ones of another member
PAIRS = [((0,), (0,)), ((0, 3), (0, 3)), ((3,), (0,)), ((3,), (2,)), ((2, 3), (0, 1))]


@pytest.mark.parametrize("window", [None, 1, 3, 13, 40])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_stretches_are_what_the_mask_shows(
    pair: tuple, packed: bool, window: int | None
) -> None:
    rows = (1, 5, 2, 12, 4), (24,), (3, 1, 1, 6, 13), (6, 6, 6, 6)
    segments = np.stack([np.repeat(np.arange(len(row)), row) for row in rows])
    queries, keys = (places(*chunks, size=6) for chunks in pair)
    mask = block(
        segments if packed else None, window, queries, queries if pair[0] == pair[1] else keys
    )
    first, stop = visible_keys(mask, 4)
    assert np.all(np.diff(first) >= 0) and np.all(np.diff(stop) >= 0) and np.all(first <= stop)
    key = np.arange(len(keys))
    seen = (key >= np.asarray(first)[..., None]) & (key < np.asarray(stop)[..., None])
    for row in range(4):
        ids = segments[row] if packed else None
        whole = written_out(24, 24, True, window, ids)
        np.testing.assert_array_equal(seen[row], whole[np.ix_(queries, keys)])


def test_the_numbers_of_a_row_of_its_own_need_not_rise() -> None:
    segments = documents((1, 5, 2, 12), (20,))
    row = np.arange(20)
    first, _ = visible_keys(block(segments, None, row, row), 2)
    np.testing.assert_array_equal(first[0], np.repeat([0, 1, 6, 8], [1, 5, 2, 12]))
    assert not first[1].any()


@pytest.mark.parametrize("least", [4, 9])
def test_stretches_between_the_chunks_of_documents_cut_by_themselves(least: int) -> None:
    """A chunk holds a part of each long document; it sees an earlier chunk, or itself."""
    chunks, size = 4, 12
    rows = (7, 5, 20, 2, 14), (48,), (3, 1, 1, 6, 13, 24)
    segments = np.stack([np.repeat(np.arange(len(row)), row) for row in rows])
    place = np.broadcast_to(np.arange(chunks * size), segments.shape)
    original = {"segment_ids": segments, "document": segments, "place": place}
    cut = cut_documents(original, chunks, least)
    assert not np.array_equal(cut["place"], place)
    for queries in range(chunks):
        for keys in range(queries + 1):
            of = [slice(size * chunk, size * (chunk + 1)) for chunk in (queries, keys)]
            there = [places(chunk, size=size) for chunk in (queries, keys)]
            mask = block(cut["segment_ids"], None, there[0], there[queries != keys])
            first, stop = visible_keys(mask, len(rows))
            key = np.arange(size)
            seen = (key >= np.asarray(first)[..., None]) & (key < np.asarray(stop)[..., None])
            documents, order = (
                [cut[name][:, part] for part in of] for name in ("document", "place")
            )
            expected = documents[0][:, :, None] == documents[1][:, None, :]
            expected &= order[0][:, :, None] >= order[1][:, None, :]
            np.testing.assert_array_equal(seen, expected)


def test_auto_takes_it_for_packed_rows_alone() -> None:
    assert choose_backend("auto", SPEC, "gpu").name == "mosaic_gpu"
    plain = dataclasses.replace(SPEC, segments=False)
    assert choose_backend("auto", plain, "gpu").name == "cudnn"
    assert choose_backend("mosaic_gpu", plain, "gpu").name == "mosaic_gpu"
    in_blocks = dataclasses.replace(SPEC, blocks=True)
    assert choose_backend("auto", in_blocks, "gpu").name == "mosaic_gpu"


@pytest.mark.parametrize(
    ("changes", "platform", "reason", "instead"),
    [
        ({}, "cpu", "this is a cpu", "xla"),
        ({"dtype": jnp.dtype(jnp.float32)}, "gpu", "not float32", "xla"),
        ({"head_dim": 64}, "gpu", "head_dim must be 128, and is 64", "cudnn"),
        ({"query_length": 192, "key_length": 192}, "gpu", "multiple of 128 .* has 192", "cudnn"),
        ({"causal": False}, "gpu", "it is causal", "cudnn"),
        ({"dropout": True}, "gpu", "no dropout", "xla"),
        ({"deterministic": True}, "gpu", "in any order", "xla"),
        ({"key_segments": True}, "gpu", "of their own for the keys", "xla"),
        ({"blocks": True, "query_length": 64, "key_length": 64}, "gpu", "a chunk must be", "cudnn"),
    ],
)
def test_what_it_refuses_another_kernel_computes(
    changes: dict, platform: str, reason: str, instead: str
) -> None:
    spec = dataclasses.replace(SPEC, **changes)
    with pytest.raises(ConfigError, match=f"attention_backend=mosaic_gpu.*{reason}.*auto or xla"):
        choose_backend("mosaic_gpu", spec, platform)
    assert choose_backend("auto", spec, platform).name == instead


def test_a_gpu_that_is_no_hopper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mosaic_gpu, "_compute_capability", lambda: "10.0")
    with pytest.raises(ConfigError, match="compute capability 9.0, and this GPU has 10.0"):
        choose_backend("mosaic_gpu", SPEC, "gpu")


@pytest.mark.parametrize(("action", "times"), [("save", 1), ("recompute", 2)])
def test_output_and_statistics_are_kept_under_the_name_core_attn(
    action: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept, the forward pass is not computed again for the backward pass."""

    @jax.jit
    def counted(q: jax.Array, k: jax.Array, v: jax.Array, *stretches: jax.Array) -> tuple:
        return q + k + v, q[..., 0].swapaxes(1, 2)

    def forward(*operands: jax.Array, scale: float) -> tuple:
        assert scale == 0.5
        return counted(*operands)

    def backward(q, k, v, first, stop, out, lse, d_out, *, scale: float) -> tuple:
        shared = out + lse.swapaxes(1, 2)[..., None]
        return d_out * shared, d_out * shared, d_out * shared

    monkeypatch.setattr(attention_mosaic_gpu, "forward", forward)
    monkeypatch.setattr(attention_mosaic_gpu, "backward", backward)

    def loss(q: jax.Array) -> jax.Array:
        out = dot_product_attention(
            *(q, q, q),
            scale=0.5,
            causal=True,
            segment_ids=jnp.zeros((1, 128), jnp.int32),
            backend=ATTENTION_BACKENDS["mosaic_gpu"],
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    policy = by_name({"core_attn": action}, drop_gathered=False)
    gradient = jax.grad(jax.checkpoint(loss, policy=policy))
    text = str(jax.make_jaxpr(gradient)(jnp.ones((1, 128, 1, 128), jnp.bfloat16)))
    assert text.count("name=counted") == times


CUTS = "cuts anywhere"
GPU_CASES = {
    "one document": {"segment_ids": documents((384,), (384,))},
    "cuts at blocks": {"segment_ids": documents((128, 256), (64, 64, 192, 64))},
    CUTS: {"segment_ids": documents((1, 126, 2, 200, 55), (383, 1))},
    "single tokens": {"segment_ids": documents((1,) * 384, (200, *(1,) * 184))},
    "documents and window": {"segment_ids": documents((100, 284), (384,)), "window": 70},
    "not packed": {},
    "window": {"window": 150},
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "groups"), [*((case, 2) for case in GPU_CASES), (CUTS, 4), (CUTS, 1)]
)
def test_output_and_gradients_equal_the_exact_kernels(case: str, groups: int) -> None:
    rng = np.random.default_rng(0)
    draw = lambda heads: jnp.asarray(rng.normal(size=(2, 384, heads, 128)), jnp.bfloat16)  # noqa: E731
    *qkv, d_out = draw(4), draw(groups), draw(groups), draw(4)

    def run(name: str, *arrays: jax.Array) -> list[np.ndarray]:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = dot_product_attention(
                *(q, k, v),
                scale=0.1,
                causal=True,
                backend=ATTENTION_BACKENDS[name],
                **GPU_CASES[case],
            )
            return jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32)), out

        gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
        return [np.asarray(x, np.float32) for x in (out, *gradients)]

    exact = run("xla", *(x.astype(jnp.float32) for x in qkv))
    for got, want in zip(run("mosaic_gpu", *qkv), exact, strict=True):
        assert np.abs(got - want).max() < 0.01 * np.abs(want).max() + 1e-5


@pytest.mark.gpu
def test_other_documents_have_exactly_no_influence() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 256, 2, 128)), jnp.bfloat16) for _ in range(3))
    segments = documents((100, 156))

    def run(k: jax.Array, v: jax.Array) -> np.ndarray:
        out = dot_product_attention(
            *(q, k, v),
            scale=0.1,
            causal=True,
            segment_ids=segments,
            backend=ATTENTION_BACKENDS["mosaic_gpu"],
        )
        return np.asarray(out, np.float32)

    before, after = run(k, v), run(k.at[:, :100].set(30.0), v.at[:, :100].set(30.0))
    np.testing.assert_array_equal(before[:, 100:], after[:, 100:])
    assert np.abs(before[:, :100] - after[:, :100]).max() > 1


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("packed", [True, False])
def test_the_blocks_of_a_ring_of_two_add_up(packed: bool, window: int | None) -> None:
    """Chunks of 128 tokens; the first member holds 0 and 3, the second 1 and 2."""
    rng = np.random.default_rng(2)
    round_ = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)  # noqa: E731
    q, k, v, d_out = (round_(rng.normal(size=(2, 512, heads, 128))) for heads in (4, 2, 2, 4))
    rows = (100, 28, 300, 84), (1, 511)
    segments = np.stack([np.repeat(np.arange(len(row)), row) for row in rows]) if packed else None
    pairs = [
        ((0, 3), (0, 3)),
        ((1, 2), (1, 2)),
        ((3,), (1,)),
        ((3,), (2,)),
        ((1,), (0,)),
        ((2,), (0,)),
    ]
    kernel, scale = ATTENTION_BACKENDS["mosaic_gpu"].blocks, 0.1
    out, lse = np.zeros(q.shape, np.float32), np.full((2, 4, 512), -1e30, np.float32)
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (q, k, v))

    def cut(pair: tuple) -> tuple:
        rows = places(*pair[0], size=128)
        columns = rows if pair[0] == pair[1] else places(*pair[1], size=128)
        arguments = {
            "scale": scale,
            "mask": block(segments, window, rows, columns),
            "dropout": None,
        }
        operands = (
            jnp.asarray(x, jnp.bfloat16) for x in (q[:, rows], k[:, columns], v[:, columns])
        )
        return rows, columns, tuple(operands), arguments

    for rows, _, operands, arguments in map(cut, pairs):
        part = kernel.forward(*operands, **arguments)
        out[:, rows], lse[:, :, rows] = merge(out[:, rows], lse[:, :, rows], *part)
    for rows, columns, operands, arguments in map(cut, pairs):
        of_queries = (
            jnp.asarray(out[:, rows], jnp.bfloat16),
            lse[:, :, rows],
            jnp.asarray(d_out[:, rows], jnp.bfloat16),
        )
        shares = kernel.backward(*operands, *of_queries, **arguments)
        for total, share, at in zip((dq, dk, dv), shares, (rows, columns, columns), strict=True):
            total[:, at] += np.asarray(share, np.float32)
    ids = [None, None] if segments is None else segments
    seen = np.stack([written_out(512, 512, True, window, row) for row in ids])
    want = attention(q, k, v, scale, seen), *attention_gradients(q, k, v, scale, seen, d_out)
    for a, b in zip((out, dq, dk, dv), want, strict=True):
        assert np.abs(a - b).max() < 0.01 * np.abs(b).max()
