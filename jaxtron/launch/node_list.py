"""SLURM's compact node lists: ``nodeA,rack[1-2]n[01-03]``."""

import re
from collections.abc import Iterator

from jaxtron.errors import LaunchError

_RANGE = re.compile(r"(\d+)-(\d+)")


def expand_node_list(text: str) -> tuple[str, ...]:
    """Host names of a SLURM node list, in order.

    Items are separated by commas; ``[...]`` holds numbers, ranges (whose leading zeros are kept:
    ``[09-11]`` is 09, 10, 11) or further items, and may stand anywhere and repeatedly in a name.

    Raises:
        LaunchError: brackets do not match, or a range or an item is empty.
    """
    return tuple(host for item in _split(text, text) for host in _expand(item, text))


def _split(group: str, text: str) -> Iterator[str]:
    """Items of a comma-separated group, cut at the commas outside brackets."""
    depth = start = 0
    for position, character in enumerate(group):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
            if depth < 0:
                raise _malformed(text, "']' without '['")
        elif character == "," and depth == 0:
            yield group[start:position]
            start = position + 1
    if depth:
        raise _malformed(text, "'[' without ']'")
    yield group[start:]


def _expand(item: str, text: str) -> list[str]:
    """Names that one item stands for: every combination of its bracket groups."""
    if not item.strip():
        raise _malformed(text, "an empty name")
    opening = item.find("[")
    if opening < 0:
        return [item.strip()]
    closing = _matching(item, opening)
    prefix, group, rest = item[:opening].strip(), item[opening + 1 : closing], item[closing + 1 :]
    middles = [name for part in _split(group, text) for name in _numbers(part, text)]
    endings = _expand(rest, text) if rest.strip() else [""]
    return [f"{prefix}{middle}{ending}" for middle in middles for ending in endings]


def _numbers(part: str, text: str) -> list[str]:
    """One entry of a bracket group: a range, or an item like those outside."""
    match = _RANGE.fullmatch(part.strip())
    if match is None:
        return _expand(part, text)
    low, high = match.groups()
    if int(low) > int(high):
        raise _malformed(text, f"the range {part} runs backwards")
    return [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]


def _matching(item: str, opening: int) -> int:
    """Position of the bracket that closes the one at ``opening``."""
    depth = 0
    for position in range(opening, len(item)):
        depth += {"[": 1, "]": -1}.get(item[position], 0)
        if depth == 0:
            return position
    raise AssertionError("_split passes balanced items only")


def _malformed(text: str, reason: str) -> LaunchError:
    return LaunchError(
        f"SLURM node list {text!r} cannot be read: {reason}; a list looks like "
        "node1,rack[1-2]n[01-03]"
    )
