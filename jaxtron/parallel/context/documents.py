"""The documents of packed rows: where they lie, and how long they really are.

A document is a run of tokens with one segment id. What stands behind its last trained token cannot
change the loss, as attention is causal: it is padding, like a run without a trained token.
Documents are counted, scheduled and moved without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxtron.errors import DataError

Rows = Mapping[str, NDArray]

TILE = 2048
"""Tokens of a tile of the attention kernel for packed rows."""


@dataclass(frozen=True)
class Documents:
    """Documents of some rows, in the order in which they lie there.

    Attributes:
        starts: place of each document's first token in the rows laid end to end, int64 ``[n]``.
        lengths: tokens up to the last trained one, int64 ``[n]``, 1 or more.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def find_documents(segment_ids: NDArray, loss_mask: NDArray) -> Documents:
    """Documents that have a trained token, of rows ``[rows, seq]``.

    Raises:
        DataError: the numbers of documents go down within a row.
    """
    step = np.diff(segment_ids, axis=1)
    if np.any(step < 0):
        row, place = np.argwhere(step < 0)[0]
        raise DataError(
            f"segment_ids go down from {segment_ids[row, place]} to {segment_ids[row, place + 1]} "
            f"at token {place + 1} of a row: documents of a row are numbered in their order"
        )
    first = np.ones(segment_ids.shape, bool)
    first[:, 1:] = step != 0
    starts = np.flatnonzero(first)
    place = np.where(loss_mask.reshape(-1) > 0, np.arange(loss_mask.size), -1)
    lengths = np.maximum.reduceat(place, starts) - starts + 1
    trained = lengths > 0
    return Documents(starts[trained], lengths[trained])


def document_lengths(segment_ids: NDArray, loss_mask: NDArray) -> NDArray[np.int32]:
    """For every token, the length of its document; 0 for padding. ``[rows, seq]``."""
    found = find_documents(segment_ids, loss_mask)
    lengths = np.zeros(segment_ids.size, np.int32)
    lengths[_places(found.starts, found.lengths)] = np.repeat(found.lengths, found.lengths)
    return lengths.reshape(segment_ids.shape)


def cut_padding(
    segment_ids: NDArray, document_length: NDArray, size: int = TILE
) -> NDArray[np.int32]:
    """Numbers of documents ``[rows, seq]``, with padding in pieces of ``size`` places.

    Nobody reads what padding attends to, so it need not attend far: a kernel that leaves out what
    documents hide then leaves out nearly all of it.

    Args:
        segment_ids: ``[rows, seq]``, ascending in a row.
        document_length: as :func:`document_lengths` returns it; 0 marks padding.
    """
    padding = document_length == 0
    new = np.zeros(segment_ids.shape, bool)
    new[:, 1:] = (np.diff(segment_ids, axis=1) != 0) | (padding[:, 1:] != padding[:, :-1])
    new |= padding & (np.arange(segment_ids.shape[1]) % size == 0)
    new[:, 0] = False
    return np.cumsum(new, axis=1, dtype=np.int32)


def pack_documents(
    rows: Rows, documents: Documents, members: Sequence[Sequence[int]], length: int
) -> dict[str, NDArray]:
    """New rows of whole documents, each padded at its end.

    Args:
        rows: arrays ``[rows, seq]`` in which the documents lie.
        documents: of these rows.
        members: the documents of each new row, by number.
        length: places of a new row.

    Returns:
        The same arrays, ``[len(members), length]``. A row's documents are numbered from 0, and its
        padding is token 0 without loss, in a segment of its own.
    """
    packed = {name: np.zeros((len(members), length), array.dtype) for name, array in rows.items()}
    packed["segment_ids"][...] = np.array([len(row) for row in members])[:, None]
    for number, row in enumerate(members):
        chosen = np.array(row, np.int64)
        lengths = documents.lengths[chosen]
        source = _places(documents.starts[chosen], lengths)
        for name, array in rows.items():
            packed[name][number, : len(source)] = array.reshape(-1)[source]
        packed["segment_ids"][number, : len(source)] = np.repeat(np.arange(len(row)), lengths)
    return packed


def _places(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of all tokens of some documents, one document after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
