"""Documents of packed rows cut in zig-zag chunks of their own."""

import numpy as np
import pytest

from jaxtron.parallel.context.attention import ContextAttention
from jaxtron.parallel.context.balance import chunk_order, cut_documents
from jaxtron.parallel.context.layout import ContextLayout


def row_of(*lengths: int) -> np.ndarray:
    return np.repeat(np.arange(len(lengths)), lengths)


def test_a_row_by_hand() -> None:
    # two chunks a document: 5 tokens are 3 + 2, then the 3 are 1 + 2, so both chunks hold 4
    order, numbers = chunk_order(row_of(3, 5), chunks=2, least=3, piece=1)
    assert order.tolist() == [3, 4, 5, 0, 6, 7, 1, 2]
    assert numbers.tolist() == [0, 0, 0, 1, 0, 0, 1, 1]


def test_short_documents_are_cut_together() -> None:
    # 4 tokens by themselves, 1 + 2 + 1 together
    order, numbers = chunk_order(row_of(1, 4, 2, 1), chunks=4, least=4, piece=1)
    assert order.tolist() == [1, 0, 2, 5, 3, 6, 4, 7]
    assert numbers.tolist() == [0, 1, 0, 2, 0, 2, 0, 3]


def test_documents_are_cut_in_whole_tiles_where_attention_works_in_tiles() -> None:
    # tiles of 2: 9 tokens are 2 + 2 + 2 + 3, then 4 are two tiles where most room is, then 3
    order, numbers = chunk_order(row_of(9, 4, 3), chunks=4, least=4, piece=2)
    assert order.tolist() == [0, 1, 9, 10, 2, 3, 11, 12, 4, 5, 13, 14, 6, 7, 8, 15]
    assert numbers.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 2, 2, 0, 0, 0, 2]
    # tiles of 4: no chunk has room for all of the last document, which is cut with the padding
    order, _ = chunk_order(row_of(7, 7, 7, 3), chunks=6, least=3, piece=4)
    assert order.reshape(6, 4).tolist() == [
        [0, 1, 2, 3],
        [7, 8, 9, 10],
        [14, 15, 16, 17],
        [18, 19, 20, 21],
        [11, 12, 13, 22],
        [4, 5, 6, 23],
    ]


@pytest.mark.parametrize(("length", "piece"), [(4096, 2048), (4094, 1)])
def test_chunks_of_whole_tiles_of_2048_tokens_are_cut_in_them(length: int, piece: int) -> None:
    segments = row_of(2 * length - 3000, 3000).astype(np.int32)[None]
    order, numbers = chunk_order(segments[0], 2, 1, piece)
    cut = cut_documents({"tokens": np.arange(2 * length)[None], "segment_ids": segments}, 2, 1)
    np.testing.assert_array_equal(cut["tokens"][0], order)
    np.testing.assert_array_equal(cut["segment_ids"][0], numbers)
    # of 5192 tokens 2048 + 3144, of 5188 the half
    assert np.count_nonzero(numbers[:length] == 0) == {2048: 2048, 1: 2594}[piece]


@pytest.mark.parametrize("piece", [1, 4])
@pytest.mark.parametrize("least", [1, 7, 1000])
def test_every_chunk_has_its_share_of_every_long_document_in_order(least: int, piece: int) -> None:
    rng = np.random.default_rng(0)
    chunks, seq = 8, 160
    for _ in range(50):
        cuts = np.sort(rng.choice(np.arange(1, seq), int(rng.integers(0, 30)), replace=False))
        lengths = np.diff(np.concatenate([[0], cuts, [seq]]))
        segments = row_of(*lengths)
        order, numbers = chunk_order(segments, chunks, least, piece)
        assert sorted(order.tolist()) == list(range(seq))
        document, in_chunks = segments[order], order.reshape(chunks, -1)
        assert len({*zip(document.tolist(), numbers.tolist(), strict=True)}) == len(lengths)
        for part in numbers.reshape(chunks, -1):
            assert np.all(np.diff(part) >= 0)
        for number, length in enumerate(lengths):
            assert np.all(np.diff(order[document == number]) > 0)
            if length >= least and piece == 1:
                counts = [np.count_nonzero(segments[chunk] == number) for chunk in in_chunks]
                assert {*counts} <= {length // chunks, -(-length // chunks)}


def test_members_of_a_ring_have_equal_numbers_of_visible_pairs() -> None:
    ring, length = 4, 512
    segments = row_of(256, 200, 40, 16)
    order, _ = chunk_order(segments, 2 * ring, 1, 1)
    starts = np.array([0, 256, 456, 496])
    keys = np.arange(length) - starts[segments] + 1  # that a token sees

    def pairs(tokens: np.ndarray) -> list[int]:
        halves = tokens.reshape(2 * ring, -1)
        return [int(keys[[*halves[g], *halves[2 * ring - 1 - g]]].sum()) for g in range(ring)]

    cut, whole = pairs(order), pairs(np.arange(length))
    assert sum(cut) == sum(whole) == int(keys.sum())
    assert max(cut) < 1.02 * min(cut)
    assert max(whole) > 1.5 * min(whole)


def test_arrays_of_a_row_go_together_and_groups_are_cut_apart() -> None:
    rng = np.random.default_rng(1)
    segments = np.stack([row_of(5, 11), row_of(9, 2, 5)]).astype(np.int32)
    tokens = rng.integers(0, 100, segments.shape)
    cut = cut_documents({"tokens": tokens, "segment_ids": segments}, 4, 1)
    for row in range(2):
        order, numbers = chunk_order(segments[row], 4, 1, 1)
        np.testing.assert_array_equal(cut["tokens"][row], tokens[row][order])
        np.testing.assert_array_equal(cut["segment_ids"][row], numbers)
    # two groups of two members: their rows lie side by side
    context = ContextAttention(ContextLayout(2, 1, 2), True, 1)
    together = context.balanced(
        {"tokens": tokens.reshape(1, -1), "segment_ids": segments.reshape(1, -1)}
    )
    np.testing.assert_array_equal(together["tokens"].reshape(2, -1), cut["tokens"])
