"""Which layers of a model have experts, and how layers of both kinds are stacked."""

from collections.abc import Sequence

Pattern = tuple[int, ...]
"""Per layer 1 (experts) or 0 (an MLP)."""


def layer_pattern(num_layers: int, freq: int | Sequence[int]) -> Pattern:
    """The pattern that ``model.moe_layer_freq`` spells.

    A number N gives layers 0, N, 2 N and so on experts, as in Megatron.
    """
    if isinstance(freq, int):
        return tuple(int(i % max(freq, 1) == 0) for i in range(num_layers))
    return tuple(freq)


def cut_pattern(pattern: Pattern) -> tuple[int, Pattern]:
    """Dense layers that come first and stand alone, and the block that the rest repeats.

    The shortest block is taken, and with it the fewest layers before. ``0 1 1 1`` is a layer and
    three blocks ``1``; ``0 1 0 1`` two blocks ``0 1``; a pattern that never repeats is one block.
    """
    leading = pattern.index(1) if 1 in pattern else 0
    for size in range(1, len(pattern)):
        for first in range(leading + 1):
            rest = pattern[first:]
            if rest and len(rest) % size == 0 and rest == rest[:size] * (len(rest) // size):
                return first, rest[:size]
    return 0, pattern


def layer_name(place: int) -> str:
    """Name of the layer at ``place`` of a block of several, among the parameters."""
    return f"layer_{place}"
