"""Causal balance of packed rows: long documents are cut in zig-zag chunks of their own.

The chunks of a row (``layout.py``) balance one long document, as a late token has more visible
keys than an early one. A document that fills only part of a packed row would keep few members busy.
So each document that is long enough is cut by itself: chunk c of the row gets the c-th of equal
parts of every such document, and the c-th part of all that is left, short documents and padding,
taken together as one. Lengths need no padding: all chunks are equally long.

Where the attention kernel works in tiles, the parts of a document are whole tiles, as equal as they
can be; what is no whole tile goes to one of them. Parts that begin anywhere would each touch a tile
more, with masks at both ends, and cost more than they even out. Elsewhere parts differ by one token
at most.

The tokens keep the order that attention relies on: of two tokens of one document, the earlier is in
an earlier chunk, or before the other in the same. Attention may therefore take a token's place in
this order for its position, as long as it keeps documents apart.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from jaxtron.parallel.context.documents import TILE


def cut_documents(rows: Mapping[str, NDArray], chunks: int, least: int) -> dict[str, NDArray]:
    """Rows with their tokens in the order of their chunks.

    Args:
        rows: arrays ``[rows, seq]``, among them ``segment_ids``, ascending in a row.
        chunks: 2 R, which divides ``seq``.
        least: documents of this many tokens or more are cut by themselves.

    Returns:
        The same arrays. Documents have other numbers: in a chunk they ascend, the long ones first.
    """
    piece = 1 if rows["segment_ids"].shape[1] // chunks % TILE else TILE
    orders, segments = zip(
        *(chunk_order(row, chunks, least, piece) for row in rows["segment_ids"]), strict=True
    )
    order = np.stack(orders)
    cut = {name: np.take_along_axis(array, order, axis=1) for name, array in rows.items()}
    return cut | {"segment_ids": np.stack(segments).astype(rows["segment_ids"].dtype)}


def chunk_order(
    segment_ids: NDArray, chunks: int, least: int, piece: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Order ``[seq]`` of one row's tokens, and the new numbers of their documents in that order.

    Arguments as of :func:`cut_documents`; ``segment_ids [seq]``. Documents are cut at multiples of
    ``piece`` tokens; one for which its pieces leave no room is cut with the short ones.
    """
    seq = len(segment_ids)
    starts = np.flatnonzero(np.diff(segment_ids, prepend=segment_ids[0] - 1))
    lengths = np.diff(starts, append=seq)
    room = np.full(chunks, seq // chunks)
    parts: dict[int, NDArray[np.int64]] = {}
    for document in np.argsort(-lengths, kind="stable"):
        if lengths[document] < least:
            break
        own = _parts(int(lengths[document]), room, piece)
        if own is not None:
            parts[int(document)] = own
            room = room - own
    long = np.array(list(parts), np.int64)
    rest = np.setdiff1d(np.arange(len(starts)), long)
    number = np.empty(len(starts), np.int64)
    number[np.concatenate([long, rest])] = np.arange(len(starts))
    of_token = np.repeat(number, lengths)
    chunk = np.empty(seq, np.int64)
    for document, own in parts.items():
        chunk[starts[document] :][: lengths[document]] = np.repeat(np.arange(chunks), own)
    chunk[of_token >= len(long)] = np.repeat(np.arange(chunks), room)
    order = np.lexsort((np.arange(seq), of_token, chunk))
    return order, of_token[order]


def _parts(length: int, room: NDArray, piece: int) -> NDArray[np.int64] | None:
    """Tokens of a document in each chunk, or None where these have no ``room`` for them.

    Chunks with the most room get a piece more than others, the last one with room what is left.
    """
    whole, left = divmod(length, piece)
    parts = np.full(len(room), whole // len(room) * piece)
    parts[np.argsort(parts - room, kind="stable")[: whole % len(room)]] += piece
    fitting = np.flatnonzero(room - parts >= left)
    if not len(fitting):
        return None
    parts[fitting[-1]] += left
    return parts if np.all(parts <= room) else None
