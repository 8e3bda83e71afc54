"""Causal balance of packed rows: long documents are cut in zig-zag chunks of their own.

The chunks of a row (``layout.py``) balance one long document, as a late token has more visible
keys than an early one. A document that fills only part of a packed row would keep few members busy.
So each document that is long enough is cut by itself: chunk c of the row gets the c-th of equal
parts of every such document, and the c-th part of all that is left, short documents and padding,
taken together as one. Lengths need no padding: parts differ by one token at most, and which parts
are longer goes round, so that all chunks are equally long.

The tokens keep the order that attention relies on: of two tokens of one document, the earlier is in
an earlier chunk, or before the other in the same. Attention may therefore take a token's place in
this order for its position, as long as it keeps documents apart.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def cut_documents(rows: Mapping[str, NDArray], chunks: int, least: int) -> dict[str, NDArray]:
    """Rows with their tokens in the order of their chunks.

    Args:
        rows: arrays ``[rows, seq]``, among them ``segment_ids``, ascending in a row.
        chunks: 2 R, which divides ``seq``.
        least: documents of this many tokens or more are cut by themselves.

    Returns:
        The same arrays. Documents have other numbers: in a chunk they ascend, the long ones first.
    """
    orders, segments = zip(
        *(chunk_order(row, chunks, least) for row in rows["segment_ids"]), strict=True
    )
    order = np.stack(orders)
    cut = {name: np.take_along_axis(array, order, axis=1) for name, array in rows.items()}
    return cut | {"segment_ids": np.stack(segments).astype(rows["segment_ids"].dtype)}


def chunk_order(
    segment_ids: NDArray, chunks: int, least: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Order ``[seq]`` of one row's tokens, and the new numbers of their documents in that order.

    Arguments as of :func:`cut_documents`; ``segment_ids [seq]``.
    """
    seq = len(segment_ids)
    starts = np.flatnonzero(np.diff(segment_ids, prepend=segment_ids[0] - 1))
    lengths = np.diff(starts, append=seq)
    long = np.flatnonzero(lengths >= least)
    long = long[np.argsort(-lengths[long], kind="stable")]
    rest = np.flatnonzero(lengths < least)
    number = np.empty(len(starts), np.int64)
    number[np.concatenate([long, rest])] = np.arange(len(starts))
    of_token = np.repeat(number, lengths)
    # the short documents share one group after the long ones
    group = np.minimum(of_token, len(long))
    chunk = np.empty(seq, np.int64)
    begin = 0
    for members in (np.flatnonzero(group == g) for g in range(group.max() + 1)):
        parts = np.full(chunks, len(members) // chunks)
        more = len(members) % chunks
        parts[(begin + np.arange(more)) % chunks] += 1
        begin += more
        chunk[members] = np.repeat(np.arange(chunks), parts)
    order = np.lexsort((np.arange(seq), of_token, chunk))
    return order, of_token[order]
