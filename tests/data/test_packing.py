"""Whole documents in rows: where each goes, and what a row holds, worked out by hand."""

import numpy as np
import pytest

from jaxtron.data.packing import PACKINGS, best_fit, first_fit, packed_row


def test_first_fit_takes_the_first_row_with_room() -> None:
    # rows of 10: 6 | 5 | 3 fits row 0 | 7 opens row 2 | 5 fits row 1 | 1 fits row 0 | 3 row 2
    assert first_fit([6, 5, 3, 7, 5, 1, 3], 10) == [[0, 2, 5], [1, 4], [3, 6]]


def test_best_fit_takes_long_documents_first_and_leaves_the_least_room() -> None:
    # 7, 6, 5, 5, 3, 3, 1: 7 | 6 | 5 | 5 beside 5 | 3 beside 7 (leaves 0) | 3 beside 6 | 1 beside 9
    assert best_fit([6, 5, 3, 7, 5, 1, 3], 10) == [[3, 2], [0, 6, 5], [1, 4]]


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
def test_equal_lengths_keep_their_order(packing: str) -> None:
    assert PACKINGS[packing]([4, 4, 4, 4, 4], 8) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_document_is_in_one_row_and_no_row_is_overfull(packing: str) -> None:
    rng = np.random.default_rng(3)
    for count, capacity in ((1, 5), (2, 8), (37, 16), (500, 128)):
        lengths = rng.integers(1, capacity + 1, count).tolist()
        rows = PACKINGS[packing](lengths, capacity)
        assert sorted(d for row in rows for d in row) == list(range(count))
        assert all(0 < sum(lengths[d] for d in row) <= capacity for row in rows)
        if packing != "none":
            # two rows that are at most half full could have been one
            assert sum(2 * sum(lengths[d] for d in row) <= capacity for row in rows) <= 1


def test_first_fit_equals_the_search_row_by_row() -> None:
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 40, 300).tolist()
    rows: list[list[int]] = []
    for document, length in enumerate(lengths):
        for row in rows:
            if sum(lengths[d] for d in row) + length <= 64:
                row.append(document)
                break
        else:
            rows.append([document])
    assert first_fit(lengths, 64) == rows


def test_a_row_of_two_documents_by_hand() -> None:
    first = (np.array([5, 6, 7], np.int32), np.array([False, False, True]))
    second = (np.array([8, 9, 3, 4], np.int32), np.array([True, True, False, True]))
    row = packed_row([first, second], 8)
    # the last token of a document is only a label; a first token is never predicted
    expected = {
        "tokens": [5, 6, 8, 9, 3, 0, 0, 0],
        "labels": [6, 7, 9, 3, 4, 0, 0, 0],
        "loss_mask": [0, 1, 1, 0, 1, 0, 0, 0],
        "position_ids": [0, 1, 0, 1, 2, 0, 1, 2],
        "segment_ids": [0, 0, 1, 1, 1, 2, 2, 2],
    }
    assert {name: array.tolist() for name, array in row.items()} == expected
    assert {a.dtype for n, a in row.items() if n != "loss_mask"} == {np.dtype(np.int32)}
    assert row["loss_mask"].dtype == np.float32


def test_a_row_that_is_full_has_no_padding() -> None:
    row = packed_row([(np.arange(1, 6, dtype=np.int32), np.ones(5, bool))], 4)
    assert row["tokens"].tolist() == [1, 2, 3, 4]
    assert row["labels"].tolist() == [2, 3, 4, 5]
    assert row["segment_ids"].tolist() == [0] * 4
