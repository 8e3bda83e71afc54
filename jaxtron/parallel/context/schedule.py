"""Which documents go into which microbatch, when the context degree may change between them.

On a context axis of size C, degree c splits the axis in ``(C / c, c)``: rows go over the outer
part, each row's sequence over the inner. All devices run a microbatch with one degree. Degrees and
row lengths come from a short menu, one executable each. Long documents need a high degree for
memory; short ones, packed together, waste less with a low one, where fewer devices exchange keys.

The search is greedy, as in Megatron's scheduler for dynamic context parallelism: the longest
document left opens a microbatch, and others fill its rows without making it slower. Here every
entry of the menu that holds the document is tried, and the one with the most useful work per device
second is taken. How far others may slow a microbatch down is a matter of the batch: a strict
limit leaves a few documents over, which cost a microbatch more. So some limits are tried, and the
quickest schedule is taken. Pure functions of the lengths: every process computes the same schedule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtron.errors import ConfigError, DataError
from jaxtron.observe.flops import mean_causal_keys

SLACKS = (1 + 1e-9, 1.05, 1.25)
"""Limits that are tried, of a row's attention over what it may take."""


@dataclass(frozen=True, order=True)
class MenuEntry:
    """One executable.

    Attributes:
        degree: devices that share a row, a power of two that divides the context axis.
        length: tokens of a row.
    """

    degree: int
    length: int


@dataclass(frozen=True)
class CostModel:
    """Time of one row on each of its devices; the unit does not matter.

    Attributes:
        linear: everything but attention [seconds per token].
        quadratic: attention [seconds per token squared], causal halves included.
        exchange: transfer of keys and values that is not hidden [seconds per token and member
            beyond the first].
        window: sliding window of attention, or None.
    """

    linear: float
    quadratic: float
    exchange: float = 0.0
    window: int | None = None

    def fixed(self, entry: MenuEntry) -> float:
        """Seconds that a row takes whatever it holds: padding is computed like any token."""
        own = entry.length / entry.degree
        return self.linear * own + self.exchange * own * (entry.degree - 1)

    def attention(self, length: int, degree: int) -> float:
        """Seconds that attention within one document adds."""
        return self.quadratic * 2 * length * mean_causal_keys(length, self.window) / degree

    def work(self, length: int) -> float:
        """Device seconds that a document needs, however it is placed."""
        return self.linear * length + self.attention(length, 1)


@dataclass(frozen=True)
class ScheduledMicrobatch:
    """Documents of one microbatch.

    Attributes:
        entry: the executable.
        rows: documents of each row, by number; as many rows as the axes have groups of ``degree``
            devices. An empty list is a row of padding.
        seconds: predicted; the slowest row's.
    """

    entry: MenuEntry
    rows: tuple[tuple[int, ...], ...]
    seconds: float


def default_menu(context: int, tokens_per_device: int, least: int = 1) -> tuple[MenuEntry, ...]:
    """Every power of two from ``least`` to ``context``, with rows that fill their devices."""
    for name, size in (("context", context), ("min_dynamic_context", least)):
        if size < 1 or size & (size - 1):
            near = 2 ** max(size.bit_length() - 1, 0)
            choice = f"{near} or {2 * near}" if size > 1 else "1"
            raise ConfigError(
                f"context degrees are powers of two, but parallel.{name} is {size}: set it to "
                f"{choice}, or parallel.dynamic_context to false"
            )
    degrees = [2**i for i in range(context.bit_length()) if 2**i >= least]
    return tuple(MenuEntry(degree, degree * tokens_per_device) for degree in degrees)


def schedule(
    lengths: Sequence[int],
    *,
    menu: Sequence[MenuEntry],
    context: int,
    data_shards: int,
    cost: CostModel,
) -> list[ScheduledMicrobatch]:
    """Microbatches that hold every document once.

    Args:
        lengths: of the documents [tokens], 1 or more.
        menu: the executables.
        context: size of the context axis.
        data_shards: groups of ``context`` devices over which rows are split.
        cost: predicts times.

    Raises:
        ConfigError: an entry whose degree does not divide ``context``.
        DataError: a document longer than every row of the menu.
    """
    for entry in menu:
        if entry.degree < 1 or context % entry.degree:
            raise ConfigError(f"degree {entry.degree} does not divide parallel.context {context}")
    longest = max(entry.length for entry in menu)
    for number, length in enumerate(lengths):
        if not 1 <= length <= longest:
            raise DataError(f"document {number} has {length} tokens, rows have 1 to {longest}")
    schedules = [_greedy(lengths, menu, data_shards * context, cost, slack) for slack in SLACKS]
    return min(schedules, key=total_seconds)  # of equals the strictest


def _greedy(
    lengths: Sequence[int],
    menu: Sequence[MenuEntry],
    devices: int,
    cost: CostModel,
    slack: float,
) -> list[ScheduledMicrobatch]:
    """A schedule that fills one microbatch after the other; see :func:`_fill` for ``slack``."""
    left = sorted(range(len(lengths)), key=lambda d: (-lengths[d], d))
    microbatches = []
    while left:
        tried = [
            _fill(left, lengths, entry, devices // entry.degree, cost, slack)
            for entry in sorted(menu)
            if entry.length >= lengths[left[0]]
        ]

        def useful(microbatch: ScheduledMicrobatch) -> float:
            placed = sum(cost.work(lengths[d]) for row in microbatch.rows for d in row)
            return placed / microbatch.seconds

        best = max(tried, key=useful)  # of equals the lowest degree
        microbatches.append(best)
        placed = {d for row in best.rows for d in row}
        left = [d for d in left if d not in placed]
    return microbatches


def _fill(
    left: Sequence[int],
    lengths: Sequence[int],
    entry: MenuEntry,
    rows: int,
    cost: CostModel,
    slack: float,
) -> ScheduledMicrobatch:
    """A microbatch of documents from ``left``, the longest first, each to the quickest row.

    A row's attention may take as long as the longest document's, or as an even share of all that
    is left, times ``slack``: then the rest fits one microbatch, and nothing is gained by a second.
    """
    total = sum(cost.attention(lengths[d], entry.degree) for d in left)
    limit = max(cost.attention(lengths[left[0]], entry.degree), total / rows) * slack
    members: list[list[int]] = [[] for _ in range(rows)]
    tokens, seconds = [0] * rows, [0.0] * rows
    for document in left:
        length = lengths[document]
        added = cost.attention(length, entry.degree)
        fitting = [r for r in range(rows) if tokens[r] + length <= entry.length]
        if not fitting:
            continue
        row = min(fitting, key=lambda r: (seconds[r], tokens[r], r))
        if members[row] and seconds[row] + added > limit:
            continue
        members[row].append(document)
        tokens[row] += length
        seconds[row] += added
    return ScheduledMicrobatch(entry, tuple(map(tuple, members)), cost.fixed(entry) + max(seconds))


def total_seconds(microbatches: Sequence[ScheduledMicrobatch]) -> float:
    """Predicted time of a step; microbatches run one after the other on all devices."""
    return math.fsum(microbatch.seconds for microbatch in microbatches)
