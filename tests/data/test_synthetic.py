"""Synthetic rows: a function of seed, split and row number, with a known entropy."""

import math
from collections import Counter

import numpy as np
import pytest

from jaxtron.data.masks import RowFormat
from jaxtron.data.synthetic import NOISE, SyntheticDataset, entropy


def make(split="train", **changes):
    arguments = {"num_samples": 100, "seq_length": 64, "vocab_size": 50, "seed": 3} | changes
    return SyntheticDataset(split, **arguments)


def test_rows_depend_on_seed_split_and_number_alone():
    a, b = make(), make(num_samples=7)
    assert np.array_equal(a[5]["tokens"], b[5]["tokens"])
    others = [make(seed=4)[5], make("valid")[5], make()[6]]
    assert all(not np.array_equal(a[5]["tokens"], row["tokens"]) for row in others)
    assert (len(a), len(b)) == (100, 7)
    for k in (-1, 100):
        with pytest.raises(IndexError):
            a[k]


def test_every_id_of_the_vocabulary_and_no_other_appears():
    ids = np.concatenate([make().text(k) for k in range(100)])
    assert set(ids.tolist()) == set(range(50))


def test_one_successor_a_token_in_train_and_valid_alike():
    tables = []
    for split in ("train", "valid"):
        rows = [make(split).text(k) for k in range(100)]
        follows = Counter(pair for row in rows for pair in zip(row[:-1].tolist(), row[1:].tolist()))
        tables.append({a: max(range(50), key=lambda b: follows[a, b]) for a in range(50)})
        share = sum(follows[a, b] for a, b in tables[-1].items()) / sum(follows.values())
        assert share == pytest.approx(1 - NOISE + NOISE / 50, abs=0.02)
    assert tables[0] == tables[1]


def test_entropy_of_the_closed_form():
    # Successor with probability 0.9 + 0.1/2, the other token with 0.1/2.
    assert entropy(2) == pytest.approx(-(0.95 * math.log(0.95) + 0.05 * math.log(0.05)))
    assert entropy(50) < 0.2 * math.log(50)


def test_documents_end_with_eod_where_it_is_given():
    dataset = make(
        seq_length=200,
        row_format=RowFormat(eod=7, reset_attention_mask=True, reset_position_ids=True),
    )
    rows = [dataset[k] for k in range(100)]
    ends = np.mean([np.count_nonzero(row["tokens"] == 7) for row in rows])
    assert 3 < ends < 5
    for row in rows:
        assert row["segment_ids"][-1] == np.count_nonzero(row["tokens"][:-1] == 7)
    without = make(seq_length=200, row_format=RowFormat())
    assert np.mean([np.count_nonzero(without.text(k) == 7) for k in range(100)]) == pytest.approx(
        4, abs=1.5
    )
