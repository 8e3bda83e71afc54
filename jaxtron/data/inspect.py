"""Looking into an indexed dataset: ``python -m jaxtron.data inspect``.

Every token is read once, in pieces, so a dataset larger than memory is no problem.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.indexed import IndexedDataset, bin_path
from jaxtron.data.tokenizers import Tokenizer, load_tokenizer
from jaxtron.errors import ConfigError, DataError

_CHUNK_TOKENS = 1 << 24
_SHOWN_BAD_IDS = 10
_SAMPLE_TOKENS = 160
_BAR_WIDTH = 50


@dataclass(frozen=True)
class BadId:
    """An id outside the vocabulary, and where it is (all numbers from 0)."""

    document: int
    sequence: int
    position: int
    id: int


@dataclass(frozen=True)
class Bin:
    """Documents whose length is in ``[low, high]`` tokens."""

    low: int
    high: int
    documents: int

    @property
    def label(self) -> str:
        """The range in words."""
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Sample:
    """The beginning of a document: its text, or its ids when it cannot be decoded."""

    document: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Report:
    """What :func:`inspect` found.

    Attributes:
        prefix, dtype, documents, sequences, tokens: of the dataset.
        length_min, length_median, length_mean, length_max: document length [tokens].
        histogram: of document lengths, by powers of two.
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
    length_min: int
    length_median: float
    length_mean: float
    length_max: int
    histogram: list[Bin]
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
            (
                "tokens per document",
                f"min {self.length_min}, median {self.length_median:g}, "
                f"mean {self.length_mean:.1f}, max {self.length_max}",
            ),
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
        lines = [self.prefix]
        lines += [f"  {name:<20} {value}" for name, value in self.facts()]
        lines.append("  documents by length [tokens]")
        most = max((b.documents for b in self.histogram), default=1)
        width = max((len(b.label) for b in self.histogram), default=1)
        for b in self.histogram:
            bar = "█" * -(-b.documents * _BAR_WIDTH // most)
            lines.append(f"  {b.label:>{width}} │{bar} {b.documents}")
        for sample in self.samples:
            lines.append(f"  document {sample.document}, {sample.tokens} tokens")
            lines.append(f"    {sample.text!r}")
        return "\n".join(lines)


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
        length_min=int(lengths.min()) if lengths.size else 0,
        length_median=float(np.median(lengths)) if lengths.size else 0.0,
        length_mean=float(lengths.mean()) if lengths.size else 0.0,
        length_max=int(lengths.max()) if lengths.size else 0,
        histogram=_histogram(lengths),
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


def _histogram(lengths: NDArray[np.int64]) -> list[Bin]:
    """Bins 0, 1, 2-3, 4-7, … from the shortest to the longest document that exists."""
    if not lengths.size:
        return []
    # The exponent e of length = m * 2^e with 0.5 <= m < 1 is the number of binary digits.
    counts = np.bincount(np.frexp(lengths.astype(np.float64))[1])
    used = np.flatnonzero(counts)
    return [
        Bin(1 << (digits - 1) if digits else 0, (1 << digits) - 1, int(counts[digits]))
        for digits in range(int(used[0]), int(used[-1]) + 1)
    ]


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
    chosen = np.unique(np.linspace(0, lengths.size - 1, min(wanted, lengths.size)).round())
    samples = []
    for document in chosen.astype(int).tolist():
        ids: list[int] = []
        for sequence in range(*dataset.document_indices[document : document + 2].tolist()):
            ids += dataset[sequence][: _SAMPLE_TOKENS - len(ids)].tolist()
            if len(ids) == _SAMPLE_TOKENS:
                break
        known = tokenizer is not None and all(0 <= i < tokenizer.vocab_size for i in ids)
        text = tokenizer.decode(ids) if tokenizer is not None and known else f"ids {ids}"
        more = " …" if len(ids) < lengths[document] else ""
        samples.append(Sample(document, int(lengths[document]), text + more))
    return samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("prefix", metavar="PREFIX", help="path without .bin and .idx")
    parser.add_argument(
        "--tokenizer",
        metavar="SPEC",
        help="decode the samples and check the ids against its vocabulary: 'byte', a "
        "tokenizer.json, a folder holding one, or a SentencePiece *.model",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="V",
        help="check the ids against 0 to V-1; exit status 2 if one is outside",
    )
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="documents to show (default: 3)"
    )
    parser.add_argument("--html", metavar="FILE", help="also write the report as a page")


def run(args: argparse.Namespace) -> int:
    """Run the command: print the report, write the page, then fail if ids are out of range."""
    from jaxtron.data.inspect_page import page

    if args.samples < 0:
        raise ConfigError(f"--samples {args.samples}: give 0 or more")
    if args.vocab_size is not None and args.vocab_size < 1:
        raise ConfigError(f"--vocab-size {args.vocab_size}: give 1 or more")
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer is not None else None
    report = inspect(
        args.prefix, tokenizer=tokenizer, vocab_size=args.vocab_size, samples=args.samples
    )
    print(report.text())
    if args.html is not None:
        try:
            Path(args.html).write_text(page(report), encoding="utf-8")
        except OSError as error:
            raise DataError(f"--html {args.html} cannot be written: {error.strerror}") from error
        print(f"page: {args.html}")
    if report.num_bad_ids:
        raise DataError(
            f"{report.num_bad_ids} of {report.tokens} ids are out of range:\n"
            + "\n".join(report.bad_id_lines())
        )
    return 0
