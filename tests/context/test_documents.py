"""Where documents lie in packed rows, by hand."""

import numpy as np
import pytest

from jaxtron.errors import DataError
from jaxtron.parallel.context.documents import (
    cut_padding,
    document_lengths,
    find_documents,
    pack_documents,
)

# two documents and padding; one whose end is not trained, one that is not trained, one of 1 token
SEGMENTS = np.array([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 1, 1, 5, 6]], np.int32)
MASK = np.array([[0, 1, 1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0, 1, 0]], np.float32)


def test_documents_end_at_their_last_trained_token() -> None:
    found = find_documents(SEGMENTS, MASK)
    assert found.starts.tolist() == [0, 3, 8, 14]
    assert found.lengths.tolist() == [3, 2, 3, 1]
    assert document_lengths(SEGMENTS, MASK).tolist() == [
        [3, 3, 3, 2, 2, 0, 0, 0],
        [3, 3, 3, 0, 0, 0, 1, 0],
    ]


def test_padding_is_cut_in_pieces_and_documents_stay_apart() -> None:
    lengths = document_lengths(SEGMENTS, MASK)
    # row 0: padding from place 5, pieces begin at 6; row 1: untrained ends are padding, too
    assert cut_padding(SEGMENTS, lengths, size=3).tolist() == [
        [0, 0, 0, 1, 1, 2, 3, 3],
        [0, 0, 0, 1, 2, 2, 3, 4],
    ]


def test_new_rows_hold_whole_documents() -> None:
    rows = {
        "tokens": np.arange(10, 26, dtype=np.int32).reshape(2, 8),
        "loss_mask": MASK,
        "segment_ids": SEGMENTS,
    }
    packed = pack_documents(rows, find_documents(SEGMENTS, MASK), [(3, 0), (), (1, 2)], 6)
    assert packed["tokens"].tolist() == [
        [24, 10, 11, 12, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [13, 14, 18, 19, 20, 0],
    ]
    assert packed["loss_mask"].tolist() == [
        [1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 1, 0],
    ]
    assert packed["segment_ids"].tolist() == [
        [0, 1, 1, 1, 2, 2],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 2],
    ]


def test_numbers_that_go_down_are_refused() -> None:
    with pytest.raises(DataError, match="from 1 to 0 at token 2"):
        find_documents(np.array([[0, 1, 0]]), np.ones((1, 3)))
