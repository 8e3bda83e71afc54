"""Packing whole documents into rows of a fixed length: bin packing, and what a row is made of."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.masks import Row


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Each document in turn goes to the first row with room for it.

    At most 1.7 times as many rows as the best packing (Dosa and Sgall 2013). O(n log n): a tree
    over the rows holds the largest room below each node.

    Args:
        lengths: of the documents [tokens], each from 1 to ``capacity``.
        capacity: tokens of a row.

    Returns:
        the documents of every row, by number, in the order in which they came.
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    rows: list[list[int]] = []
    for document, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        row = node - leaves
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The longest document first, each to the row where it leaves the least room.

    Best-fit decreasing: at most 11/9 of the best packing and 1 row (Johnson 1974). Equal lengths
    keep their order, and of rows with equal room the oldest is taken. Arguments and result as of
    :func:`first_fit`; rows come in the order in which they were opened.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        length = lengths[document]
        place = bisect_left(room, (length, -1))
        if place == len(room):
            left, row = capacity, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(document)
        if left > length:
            insort(room, (left - length, row))
    return rows


def one_each(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Every document has a row of its own."""
    return [[document] for document in range(len(lengths))]


PACKINGS: dict[str, Callable[[Sequence[int], int], list[list[int]]]] = {
    "none": one_each,
    "first_fit": first_fit,
    "best_fit": best_fit,
}
"""Algorithms by the name that ``data.packing`` gives them."""


def packed_row(documents: Sequence[tuple[NDArray, NDArray]], seq_length: int) -> Row:
    """A row of whole documents, padded at its end.

    A document of n tokens takes n - 1 places: its last token is only a label.

    Args:
        documents: ``(tokens int32 [n], trained bool [n])``; a prediction carries loss where the
            token that it predicts is trained.
        seq_length: places of the row.

    Returns:
        ``tokens, labels, loss_mask``, ``position_ids`` from 0 in every document, and
        ``segment_ids``: the documents' numbers in the row. Padding is token 0 without loss, in a
        segment of its own after the last document.
    """
    row: Row = {
        name: np.zeros(seq_length, np.float32 if name == "loss_mask" else np.int32)
        for name in ("tokens", "labels", "loss_mask", "position_ids", "segment_ids")
    }
    start = 0
    for number, (tokens, trained) in enumerate(documents):
        places = slice(start, start + len(tokens) - 1)
        row["tokens"][places] = tokens[:-1]
        row["labels"][places] = tokens[1:]
        row["loss_mask"][places] = trained[1:]
        row["position_ids"][places] = np.arange(len(tokens) - 1)
        row["segment_ids"][places] = number
        start = places.stop
    row["segment_ids"][start:] = len(documents)
    row["position_ids"][start:] = np.arange(seq_length - start)
    return row
