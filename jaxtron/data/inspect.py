"""Looking into an indexed dataset: ``python -m jaxtron.data inspect PREFIX``.

Every token is read once, in pieces, so a dataset larger than memory is no problem.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.indexed import IndexedDataset, bin_path
from jaxtron.data.inspect_parts import (
    Lengths,
    Sample,
    at_even_distances,
    report_text,
    summary,
)
from jaxtron.data.tokenizers import Tokenizer

_CHUNK_TOKENS = 1 << 24
_SHOWN_BAD_IDS = 10
_SAMPLE_TOKENS = 160


@dataclass(frozen=True)
class BadId:
    """An id outside the vocabulary, and where it is (all numbers from 0)."""

    document: int
    sequence: int
    position: int
    id: int


@dataclass(frozen=True)
class Report:
    """What :func:`inspect` found.

    Attributes:
        prefix, dtype, documents, sequences, tokens: of the dataset.
        lengths: of the documents.
        id_min, id_max: smallest and largest id, None without tokens.
        vocab_size: what ids were checked against, None if nothing.
        num_bad_ids: tokens below 0 or at least ``vocab_size``.
        bad_ids: the first of them.
        samples: documents at even distances.
    """

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    lengths: Lengths
    id_min: int | None
    id_max: int | None
    vocab_size: int | None
    num_bad_ids: int
    bad_ids: list[BadId]
    samples: list[Sample]

    def facts(self) -> list[tuple[str, str]]:
        """Name and value of every number."""
        ids = "none" if self.id_min is None else f"{self.id_min} to {self.id_max}"
        checked = f" (vocabulary: 0 to {self.vocab_size - 1})" if self.vocab_size else ""
        rows = [
            ("documents", f"{self.documents}"),
            ("sequences", f"{self.sequences}"),
            ("tokens", f"{self.tokens}"),
            ("dtype", self.dtype),
            ("tokens per document", str(self.lengths)),
            ("ids", ids + checked),
        ]
        if self.vocab_size is not None:
            rows.append(("ids out of range", f"{self.num_bad_ids}"))
        return rows

    def bad_id_lines(self) -> list[str]:
        """One line for each of the first ids out of range, then how many more there are."""
        lines = [
            f"dataset {self.prefix}, document {bad.document} (sequence {bad.sequence}, "
            f"position {bad.position}): id {bad.id} is outside 0 to {(self.vocab_size or 0) - 1}"
            for bad in self.bad_ids
        ]
        if self.num_bad_ids > len(self.bad_ids):
            lines.append(f"and {self.num_bad_ids - len(self.bad_ids)} more")
        return lines

    def text(self) -> str:
        """The report for a terminal."""
        return report_text(self.prefix, self.facts(), self.lengths, self.samples)


def inspect(
    prefix: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    samples: int = 3,
) -> Report:
    """Read a whole dataset and report on it.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        tokenizer: decodes the samples, and gives ``vocab_size`` if that is None.
        vocab_size: ids below 0 or from here on are out of range.
        samples: documents to show.

    Raises:
        DataError: the dataset is missing or damaged. Ids out of range are reported, not raised.
    """
    dataset = IndexedDataset(prefix)
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    lengths = _document_lengths(dataset)
    id_min, id_max, num_bad, bad = _scan(dataset, vocab_size)
    return Report(
        prefix=dataset.prefix,
        dtype=dataset.dtype.name,
        documents=dataset.num_documents,
        sequences=len(dataset),
        tokens=dataset.num_tokens,
        lengths=summary(lengths),
        id_min=id_min,
        id_max=id_max,
        vocab_size=vocab_size,
        num_bad_ids=num_bad,
        bad_ids=bad,
        samples=_samples(dataset, lengths, tokenizer, samples),
    )


def _document_lengths(dataset: IndexedDataset) -> NDArray[np.int64]:
    ends = np.concatenate(([0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)))
    return np.diff(ends[dataset.document_indices])


def _scan(
    dataset: IndexedDataset, vocab_size: int | None
) -> tuple[int | None, int | None, int, list[BadId]]:
    if not dataset.num_tokens:
        return None, None, 0, []
    tokens = np.memmap(bin_path(dataset.prefix), dataset.dtype, mode="r")
    lows, highs = [], []
    num_bad = 0
    bad: list[BadId] = []
    for start in range(0, tokens.size, _CHUNK_TOKENS):
        piece = np.asarray(tokens[start : start + _CHUNK_TOKENS])
        lows.append(int(piece.min()))
        highs.append(int(piece.max()))
        if vocab_size is None or (lows[-1] >= 0 and highs[-1] < vocab_size):
            continue
        offenders = np.flatnonzero((piece < 0) | (piece >= vocab_size))
        num_bad += offenders.size
        for offset in offenders[: _SHOWN_BAD_IDS - len(bad)].tolist():
            byte = (start + offset) * dataset.dtype.itemsize
            # The last sequence that starts here or before: empty ones share their start.
            sequence = int(np.searchsorted(dataset.sequence_pointers, byte, side="right")) - 1
            first = int(dataset.sequence_pointers[sequence])
            bad.append(
                BadId(
                    document=dataset.document_of(sequence),
                    sequence=sequence,
                    position=(byte - first) // dataset.dtype.itemsize,
                    id=int(piece[offset]),
                )
            )
    return min(lows), max(highs), num_bad, bad


def _samples(
    dataset: IndexedDataset,
    lengths: NDArray[np.int64],
    tokenizer: Tokenizer | None,
    wanted: int,
) -> list[Sample]:
    samples = []
    for document in at_even_distances(lengths.size, wanted):
        ids: list[int] = []
        for sequence in range(*dataset.document_indices[document : document + 2].tolist()):
            ids += dataset[sequence][: _SAMPLE_TOKENS - len(ids)].tolist()
            if len(ids) == _SAMPLE_TOKENS:
                break
        known = tokenizer is not None and all(0 <= i < tokenizer.vocab_size for i in ids)
        text = tokenizer.decode(ids) if tokenizer is not None and known else f"ids {ids}"
        more = " …" if len(ids) < lengths[document] else ""
        samples.append(Sample(f"document {document}, {lengths[document]} tokens", text + more))
    return samples
