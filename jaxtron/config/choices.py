"""Values that would be right, for messages."""

import math
from collections.abc import Callable, Mapping

Axes = Mapping[str, int]


def tensor_sizes(axes: Axes, fits: Callable[[int], bool]) -> str:
    """The nearest sizes of `tensor` that fit and divide the devices of the job."""
    devices = math.prod(axes.values())
    return either(near([t for t in divisors(devices) if fits(t)], axes["tensor"]))


def divisors(number: int) -> list[int]:
    """Divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def near(choices: list[int], value: int) -> list[int]:
    """The nearest choice below and above a value."""
    below = [choice for choice in choices if choice < value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return below + above


def divisors_near(number: int, value: int) -> list[int]:
    """The divisors of ``number`` next to ``value``."""
    return near(divisors(number), value)


def multiples_near(number: int, factor: int) -> list[int]:
    """The multiples of ``factor`` next to ``number``."""
    below = number // factor * factor
    return [multiple for multiple in (below, below + factor) if multiple]


def either(choices: list[int]) -> str:
    """``choices`` in words."""
    return " or ".join(map(str, choices))
