"""Attention block by block, merged by log-sum-exp, against the softmax over all keys in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.kernels import query_blocks
from jaxtron.kernels.attention_block import BlockMask, merge
from jaxtron.kernels.attention_block_xla import XlaBlockKernel
from jaxtron.kernels.attention_tiles import TiledBlockKernel
from jaxtron.layers.dropout import AttentionDropout, dropout_key
from tests.kernels.reference import attention, attention_gradients, visible_keys

BATCH, LENGTH, HEADS, GROUPS, HEAD_DIM, SCALE = 2, 12, 4, 2, 8, 0.3
KERNEL = XlaBlockKernel()


def arrays(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    q, k = (BATCH, LENGTH, HEADS, HEAD_DIM), (BATCH, LENGTH, GROUPS, HEAD_DIM)
    return [rng.normal(size=s).astype(np.float32) for s in (q, k, k, q)]


SEGMENTS = np.array([[0] * 5 + [1] * 7, [0] * 2 + [1] * 3 + [2] * 7], np.int32)
MASKS = {
    "causal": {},
    "window": {"window": 4},
    "documents": {"segments": SEGMENTS},
    "documents and window": {"segments": SEGMENTS, "window": 3},
}


def blocks(segments: np.ndarray | None = None, window: int | None = None, parts: int = 3):
    """(queries, keys, mask) of the pairs of parts that causal attention needs."""
    size = LENGTH // parts
    thirds = [slice(i * size, (i + 1) * size) for i in range(parts)]
    positions = np.arange(LENGTH, dtype=np.int32)
    for i, rows in enumerate(thirds):
        for columns in thirds[: i + 1]:
            yield (
                rows,
                columns,
                BlockMask(
                    jnp.asarray(positions[rows]),
                    jnp.asarray(positions[columns]),
                    None if segments is None else jnp.asarray(segments[:, rows]),
                    None if segments is None else jnp.asarray(segments[:, columns]),
                    own_keys=rows == columns,
                    window=window,
                ),
            )


def visible(segments: np.ndarray | None = None, window: int | None = None) -> np.ndarray:
    rows = [None] * BATCH if segments is None else segments
    return np.stack([visible_keys(LENGTH, LENGTH, True, window, s) for s in rows])


def merged(q, k, v, mask: dict, dropout=None) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp, from all blocks; own keys first, as a merge needs."""
    out = np.zeros(q.shape, np.float32)
    lse = np.zeros((BATCH, HEADS, LENGTH), np.float32)
    order = sorted(blocks(**mask), key=lambda b: not b[2].own_keys)
    for rows, columns, block in order:
        drop = dropout and dataclasses.replace(
            dropout, query_positions=block.query_positions, key_positions=block.key_positions
        )
        part = KERNEL.forward(
            q[:, rows], k[:, columns], v[:, columns], scale=SCALE, mask=block, dropout=drop
        )
        if not block.own_keys:
            part = merge(out[:, rows], lse[:, :, rows], *part)
        out[:, rows], lse[:, :, rows] = part
    return out, lse


@pytest.mark.parametrize("mask", MASKS)
def test_merged_blocks_equal_the_softmax_over_all_keys(mask: str) -> None:
    q, k, v, dout = arrays()
    out, lse = merged(q, k, v, MASKS[mask])
    seen = visible(**MASKS[mask])
    np.testing.assert_allclose(out, attention(q, k, v, SCALE, seen), rtol=1e-5, atol=1e-6)

    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for rows, columns, block in blocks(**MASKS[mask]):
        shares = KERNEL.backward(
            *(q[:, rows], k[:, columns], v[:, columns]),
            *(out[:, rows], lse[:, :, rows], dout[:, rows]),
            scale=SCALE,
            mask=block,
            dropout=None,
        )
        dq[:, rows] += shares[0]
        dk[:, columns] += shares[1]
        dv[:, columns] += shares[2]
    for got, want in zip(
        (dq, dk, dv), attention_gradients(q, k, v, SCALE, seen, dout), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mask", "tile"), [("documents", 2), ("documents and window", 4)])
def test_tiles_equal_the_softmax_over_all_keys(mask: str, tile: int) -> None:
    q, k, v, dout = arrays()
    [(_, _, block)] = blocks(**MASKS[mask], parts=1)
    kernel = TiledBlockKernel(KERNEL, tile)
    seen = visible(**MASKS[mask])
    out, lse = kernel.forward(q, k, v, scale=SCALE, mask=block, dropout=None)
    np.testing.assert_allclose(out, attention(q, k, v, SCALE, seen), rtol=1e-5, atol=1e-6)
    shares = kernel.backward(q, k, v, out, lse, dout, scale=SCALE, mask=block, dropout=None)
    want = attention_gradients(q, k, v, SCALE, seen, dout)
    for got, expected in zip(shares, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_tiles_are_computed_where_something_is_visible_and_masked_where_not_all_is() -> None:
    """Twelve tokens in tiles of two, documents of five and seven, and of two, three and seven."""
    q, k, v, _ = arrays()
    [(_, _, block)] = blocks(SEGMENTS, parts=1)
    computed: list[tuple[int, int, bool]] = []

    class Watched(XlaBlockKernel):
        def forward(self, q, k, v, *, mask, **rest):
            jax.debug.callback(
                lambda i, j: computed.append((int(i) // 2, int(j) // 2, mask.plain)),
                mask.query_positions[0],
                mask.key_positions[0],
            )
            return super().forward(q, k, v, mask=mask, **rest)

    kernel = TiledBlockKernel(Watched(), 2)
    jax.block_until_ready(kernel.forward(q, k, v, scale=SCALE, mask=block, dropout=None))
    jax.effects_barrier()
    order = np.tril(np.ones((LENGTH, LENGTH), bool))
    needed = [
        (i, j, bool((tile == causal).all()))
        for row in visible(SEGMENTS)
        for i in range(6)
        for j in range(6)
        for where in [np.s_[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]]
        for tile, causal in [(row[where], order[where])]
        if tile.any()
    ]
    assert sorted(computed) == sorted(needed)
    assert {plain for _, _, plain in computed} == {True, False}


@pytest.mark.parametrize(("keys", "some"), [([4, 4, 5, 5], False), ([0, 1, 1, 5], True)])
def test_keys_of_later_documents_make_no_pair_visible(keys: list[int], some: bool) -> None:
    """Where documents are cut in chunks, a chunk before holds parts of later documents."""
    mask = BlockMask(
        query_positions=jnp.arange(4, 8),
        key_positions=jnp.arange(4),
        query_segments=jnp.array([[0, 0, 1, 1]]),
        key_segments=jnp.array([keys]),
        own_keys=False,
        window=None,
    )
    assert bool(mask.any_visible()) == some


def test_log_sum_exp_is_the_natural_logarithm_of_the_sum_over_visible_keys() -> None:
    q, k, v, _ = arrays()
    _, lse = merged(q, k, v, MASKS["documents"])
    seen = visible(SEGMENTS)
    for b, head, i in np.ndindex(BATCH, HEADS, LENGTH):
        scores = SCALE * k[b, :, head // 2].astype(np.float64) @ q[b, i, head]
        np.testing.assert_allclose(
            lse[b, head, i], np.log(np.sum(np.exp(scores[seen[b, i]]))), rtol=1e-5, atol=1e-6
        )


def test_merging_a_block_without_visible_keys_changes_nothing() -> None:
    q, k, v, _ = arrays()
    out, lse = merged(q, k, v, {})
    hidden = BlockMask(
        jnp.arange(LENGTH), jnp.arange(LENGTH), jnp.zeros((2, 12), int), jnp.ones((2, 12), int),
        own_keys=False, window=None,
    )  # fmt: skip
    part = KERNEL.forward(q, 100 * k, v, scale=SCALE, mask=hidden, dropout=None)
    assert np.all(np.isneginf(part[1]))
    after = merge(jnp.asarray(out), jnp.asarray(lse), *part)
    np.testing.assert_array_equal(after[0], out)
    np.testing.assert_array_equal(after[1], lse)
    # a kernel that masks by a large negative number
    after = merge(jnp.asarray(out), jnp.asarray(lse), part[0] + 1, jnp.full(lse.shape, -(2.0**41)))
    np.testing.assert_array_equal(after[0], out)


def test_merge_weighs_by_exponentials_far_from_overflow() -> None:
    # weights e^1000 : 3 e^1000, so the merged output is (1 * 2 + 3 * 6) / 4
    shape = (1, 1, 1, 1)
    lse = jnp.full((1, 1, 1), 1000.0)
    out, total = merge(
        jnp.full(shape, 2.0), lse, jnp.full(shape, 6.0), lse + np.float32(np.log(3.0))
    )
    np.testing.assert_allclose(out, 5.0, rtol=1e-4)
    np.testing.assert_allclose(total, 1000 + np.log(4.0), rtol=1e-6)


@pytest.mark.parametrize("mask", MASKS)
def test_queries_in_slices_give_the_same(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = arrays()
    out, lse = merged(q, k, v, MASKS[mask])
    whole = list(blocks(**MASKS[mask]))
    for limit in (2**28, 200):  # all of a block at once; one to three of its four queries
        monkeypatch.setattr(query_blocks, "MAX_SCORE_BYTES", limit)
        np.testing.assert_allclose(merged(q, k, v, MASKS[mask])[0], out, rtol=1e-6, atol=1e-7)
        rows, columns, block = whole[1]
        shares = KERNEL.backward(
            *(q[:, rows], k[:, columns], v[:, columns]),
            *(out[:, rows], lse[:, :, rows], dout[:, rows]),
            scale=SCALE,
            mask=block,
            dropout=None,
        )
        if limit == 2**28:
            expected = shares
        for got, want in zip(shares, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_dropout_in_blocks_drops_what_it_drops_in_the_whole_row() -> None:
    q, k, v, _ = arrays()
    positions = jnp.arange(LENGTH, dtype=jnp.int32)
    dropout = AttentionDropout(
        key=dropout_key(1, 2, 3, "attention_probabilities"),
        rate=0.4,
        rows=jnp.array([5, 9]),
        heads=jnp.arange(HEADS),
        query_positions=positions,
        key_positions=positions,
    )
    out, _ = merged(q, k, v, {}, dropout)
    kept = np.asarray(dropout.apply(jnp.ones((BATCH, HEADS, LENGTH, LENGTH)), positions))
    seen = visible()
    for b, head in np.ndindex(BATCH, HEADS):
        scores = SCALE * q[b, :, head].astype(np.float64) @ k[b, :, head // 2].T
        p = np.where(seen[b], np.exp(scores), 0)
        p = p / p.sum(-1, keepdims=True) * kept[b, head]
        np.testing.assert_allclose(out[b, :, head], p @ v[b, :, head // 2], rtol=1e-4, atol=1e-6)
