"""Megatron's split of one corpus into train, valid and test: by document, in file order."""

import math
from typing import NamedTuple

import numpy as np

from jaxtron.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")


class Span(NamedTuple):
    """Half-open range `[start, stop)` of sequence numbers."""

    start: int
    stop: int


def how_to_do_without(split: str) -> str:
    """What a message about a split without data adds: the setting of a run that needs none."""
    settings = {
        "valid": "; to train without evaluation set eval.interval=0",
        "test": "; to do without a test set, set eval.test=false",
    }
    return settings.get(split, "")


def parse_split(split: str | float) -> tuple[float, float, float]:
    """The weights of train, valid and test, scaled to sum to 1.

    Args:
        split: one to three weights separated by commas, `"969,30,1"`; missing ones are 0.

    Raises:
        ConfigError: not one to three finite weights >= 0 with a positive sum.
    """
    parts = str(split).split(",")
    right = 'right would be one to three weights, as in "969,30,1"'
    try:
        weights = [float(part) for part in parts]
    except ValueError:
        raise ConfigError(f"data.split: {split!r} is not a list of numbers; {right}") from None
    if len(weights) > len(SPLIT_NAMES):
        raise ConfigError(
            f"data.split: {split!r} has {len(weights)} parts for {', '.join(SPLIT_NAMES)}; {right}"
        )
    if not all(math.isfinite(w) and w >= 0 for w in weights):
        raise ConfigError(f"data.split: {split!r} has a negative or non-finite weight; {right}")
    if not sum(weights) > 0:
        raise ConfigError(f"data.split: all weights of {split!r} are zero; {right}")
    padded = np.array(weights + [0.0] * (len(SPLIT_NAMES) - len(weights)), dtype=np.float64)
    # numpy's sum and not Python's: the latter compensates rounding, Megatron's does not.
    train, valid, test = (padded / np.sum(padded)).tolist()
    return train, valid, test


def split_spans(weights: tuple[float, float, float], num_sequences: int) -> tuple[Span, Span, Span]:
    """The sequences that train, valid and test own; they are disjoint and cover everything.

    The bounds are the cumulative weights times `num_sequences`, rounded half to even.

    Args:
        weights: from :func:`parse_split`.
        num_sequences: sequences in the corpus.
    """
    bounds = [0]
    cumulative = 0.0
    for weight in weights:
        cumulative += weight
        bounds.append(min(round(cumulative * float(num_sequences)), num_sequences))
    return Span(*bounds[0:2]), Span(*bounds[1:3]), Span(*bounds[2:4])
