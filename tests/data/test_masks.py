"""Loss mask, positions and document numbers of packed rows (hand-made numbers)."""

import itertools

import numpy as np
import pytest

from jaxtron.data.masks import RowFormat, position_ids, segment_ids

E = 99
TEXT = np.array([5, 6, E, 7, 8, 9, E, 4, 3])
SWITCHES = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def test_the_example_of_a_row_with_three_documents():
    row = RowFormat(eod=E, **dict.fromkeys(SWITCHES, True)).row(TEXT)
    assert row["tokens"].tolist() == [5, 6, E, 7, 8, 9, E, 4]
    assert row["labels"].tolist() == [6, E, 7, 8, 9, E, 4, 3]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert row["segment_ids"].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert row["loss_mask"].tolist() == [1, 1, 0, 1, 1, 1, 0, 1]


def test_arrays_have_the_types_of_a_batch():
    row = RowFormat(eod=E, **dict.fromkeys(SWITCHES, True)).row(TEXT.astype(np.uint16))
    assert {key: array.dtype.name for key, array in row.items()} == {
        "tokens": "int32",
        "labels": "int32",
        "loss_mask": "float32",
        "position_ids": "int32",
        "segment_ids": "int32",
    }


@pytest.mark.parametrize("on", list(itertools.product([False, True], repeat=3)))
def test_the_three_switches_act_independently(on):
    row = RowFormat(eod=E, **dict(zip(SWITCHES, on))).row(TEXT)
    positions, attention, loss = on
    assert ("position_ids" in row) == positions
    assert ("segment_ids" in row) == attention
    assert (row["loss_mask"].sum() == 6) == loss
    assert row["loss_mask"].sum() in (6, 8)


def test_consecutive_and_leading_eods_each_end_a_document():
    tokens = np.array([E, E, 1, E, E, 2])
    assert segment_ids(tokens, E).tolist() == [0, 1, 2, 2, 3, 4]
    assert position_ids(tokens, E).tolist() == [0, 0, 0, 1, 0, 0]
    assert position_ids(np.array([3]), E).tolist() == [0]


def test_padding_carries_no_loss_and_is_fed_as_id_0():
    row = RowFormat(eod=E, pad=50).row(np.array([1, 2, E, 50, 50]))
    assert row["tokens"].tolist() == [1, 2, E, 0]
    assert row["labels"].tolist() == [2, E, 0, 0]
    assert row["loss_mask"].tolist() == [1, 1, 0, 0]


def test_a_row_does_not_touch_the_file_it_came_from():
    text = np.array([1, 50, 50], dtype=np.int32)
    text.flags.writeable = False
    RowFormat(pad=50).row(text)
    assert text.tolist() == [1, 50, 50]


def test_a_switch_without_eod_is_refused():
    with pytest.raises(ValueError, match="eod"):
        RowFormat(reset_position_ids=True)
