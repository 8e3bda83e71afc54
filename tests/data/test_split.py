"""Splits by document: bounds are cumulative shares, rounded half to even."""

from fractions import Fraction

import pytest

from jaxtron.data.split import parse_split, split_spans
from jaxtron.errors import ConfigError


@pytest.mark.parametrize(
    "split, documents, spans",
    [
        ("99,1,0", 10, [(0, 10), (10, 10), (10, 10)]),
        ("99,1,0", 51, [(0, 50), (50, 51), (51, 51)]),
        ("80,10,10", 3, [(0, 2), (2, 3), (3, 3)]),
        ("100,0,0", 7, [(0, 7), (7, 7), (7, 7)]),
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        (1, 7, [(0, 7), (7, 7), (7, 7)]),
        ("0.99,0.01", 100, [(0, 99), (99, 100), (100, 100)]),
        ("969,30,1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("1,1", 5, [(0, 2), (2, 5), (5, 5)]),  # 2.5 rounds to 2
        ("1,1", 7, [(0, 4), (4, 7), (7, 7)]),  # 3.5 rounds to 4
        (" 8 , 1 ,1", 0, [(0, 0), (0, 0), (0, 0)]),
    ],
)
def test_ranges(split, documents, spans):
    assert [tuple(span) for span in split_spans(parse_split(split), documents)] == spans


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "0.7,0.2,0.1", "3,0,7"])
def test_splits_share_no_document_and_lose_none(split):
    for documents in range(200):
        spans = split_spans(parse_split(split), documents)
        assert [i for start, stop in spans for i in range(start, stop)] == list(range(documents))


@pytest.mark.parametrize(
    "split", ["", "-1,2", "0,0,0", "nan,1", "inf", "1,2,3,4", "a,b", "1;2", "99/1/0"]
)
def test_a_split_that_means_nothing_is_refused(split):
    with pytest.raises(ConfigError, match=r"data\.split"):
        parse_split(split)


def test_weights_are_scaled_to_one():
    assert parse_split("969,30,1") == pytest.approx(
        [float(Fraction(969, 1000)), 0.03, 0.001], abs=1e-15
    )
