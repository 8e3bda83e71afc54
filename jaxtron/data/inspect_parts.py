"""What the reports on datasets and on conversations share: lengths, samples and their layout."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BAR_WIDTH = 50


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
class Lengths:
    """Lengths of documents [tokens], all 0 without documents; the histogram by powers of two."""

    minimum: int
    median: float
    mean: float
    maximum: int
    histogram: list[Bin]

    def __str__(self) -> str:
        return (
            f"min {self.minimum}, median {self.median:g}, mean {self.mean:.1f}, max {self.maximum}"
        )


@dataclass(frozen=True)
class Sample:
    """The beginning of a document: which one it is, and its text, or ids that have none."""

    heading: str
    text: str


def summary(lengths: NDArray[np.int64]) -> Lengths:
    """What a report says about lengths ``[documents]`` [tokens]."""
    if not lengths.size:
        return Lengths(0, 0.0, 0.0, 0, [])
    return Lengths(
        minimum=int(lengths.min()),
        median=float(np.median(lengths)),
        mean=float(lengths.mean()),
        maximum=int(lengths.max()),
        histogram=_histogram(lengths),
    )


def _histogram(lengths: NDArray[np.int64]) -> list[Bin]:
    """Bins 0, 1, 2-3, 4-7, … from the shortest to the longest document that exists."""
    # The exponent e of length = m * 2^e with 0.5 <= m < 1 is the number of binary digits.
    counts = np.bincount(np.frexp(lengths.astype(np.float64))[1])
    used = np.flatnonzero(counts)
    return [
        Bin(1 << (digits - 1) if digits else 0, (1 << digits) - 1, int(counts[digits]))
        for digits in range(int(used[0]), int(used[-1]) + 1)
    ]


def at_even_distances(documents: int, wanted: int) -> list[int]:
    """Numbers of at most ``wanted`` documents: the first, others, and from two on the last."""
    chosen = np.unique(np.linspace(0, documents - 1, min(wanted, documents)).round())
    return [int(document) for document in chosen]


def report_text(
    title: str, facts: Sequence[tuple[str, str]], lengths: Lengths, samples: Sequence[Sample]
) -> str:
    """A report for a terminal: names and values, bars by length, samples."""
    lines = [title]
    lines += [f"  {name:<20} {value}" for name, value in facts]
    lines.append("  documents by length [tokens]")
    most = max((b.documents for b in lengths.histogram), default=1)
    width = max((len(b.label) for b in lengths.histogram), default=1)
    for b in lengths.histogram:
        bar = "█" * -(-b.documents * _BAR_WIDTH // most)
        lines.append(f"  {b.label:>{width}} │{bar} {b.documents}")
    for sample in samples:
        lines.append(f"  {sample.heading}")
        lines.append(f"    {sample.text!r}")
    return "\n".join(lines)
