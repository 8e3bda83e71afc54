"""Which layers each stage and chunk of a pipeline holds.

``parallel.pipeline_layout`` has Megatron's form (``--pipeline-model-parallel-layout``): one symbol
a layer, ``|`` between virtual stages, ``x*n`` or ``(...)*n`` for repetition, commas and spaces for
the eye: ``Et*3|(tt|)*29tt|L``. ``E`` is the embedding, ``t`` a transformer layer, ``L`` the output
layer and loss. Stages may be of different sizes, or empty. ``E`` and ``L`` mark the two ends of the
model, where Megatron expects them; embedding and head themselves are spread over all stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from jaxtron.errors import ConfigError

_KEY = "parallel.pipeline_layout"
_LONGEST = 100_000  # symbols written out; far more than any model has


@dataclass(frozen=True)
class Placement:
    """The layers of every virtual stage.

    Attributes:
        layers: ``layers[i][c]``, the layers of chunk ``c`` on stage ``i``, in the model's numbers.
    """

    layers: tuple[tuple[range, ...], ...]

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """``counts[i][c]``: number of layers."""
        return tuple(tuple(len(chunk) for chunk in chunks) for chunks in self.layers)

    @property
    def slots(self) -> int:
        """Layers for which every stage has room: those of the fullest."""
        return max(sum(chunks) for chunks in self.counts)

    def held_by(self, stage: int) -> tuple[range, ...]:
        """Layers of a stage as the fewest ranges, empty chunks left out."""
        held: list[range] = []
        for chunk in self.layers[stage]:
            if held and held[-1].stop == chunk.start:
                held[-1] = range(held[-1].start, chunk.stop)
            elif chunk:
                held.append(chunk)
        return tuple(held)


def place_layers(
    num_layers: int,
    stages: int,
    chunks: int,
    layout: str | None,
    *,
    before: int = 0,
    block: int = 1,
) -> Placement:
    """Place a model's layers by ``parallel.pipeline_layout``, or evenly when it is null.

    Args:
        num_layers: what is placed: layers, or blocks of several.
        stages: of the pipeline.
        chunks: of a stage.
        layout: the key's value.
        before: layers of the model in front of those that are placed; for messages, like
            ``block``.
        block: layers that count as one.

    Raises:
        ConfigError: the layers do not divide evenly and no layout is given, or the layout is
            malformed or for another number of stages or layers.
    """
    virtual = stages * chunks
    if layout is None:
        if num_layers % virtual:
            raise ConfigError(_uneven(num_layers, stages, chunks, before, block))
        counts = [num_layers // virtual] * virtual
    else:
        counts = parse_layout(layout)
        if len(counts) != virtual:
            raise ConfigError(
                f"{_KEY} {layout!r} has {len(counts)} stages (parts between |), but "
                f"parallel.pipeline {stages} × parallel.virtual_pipeline {chunks} = {virtual}: set "
                f"{_fix(num_layers, virtual)}"
            )
        if sum(counts) != num_layers:
            raise ConfigError(
                f"{_KEY} {layout!r} places {sum(counts)} layers (t), but "
                f"{_to_place(num_layers, before, block)}: set {_fix(num_layers, virtual)}"
            )
    ends = list(accumulate(counts))
    ranges = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return Placement(tuple(tuple(ranges[stage::stages]) for stage in range(stages)))


def parse_layout(layout: str) -> list[int]:
    """Number of transformer layers of each virtual stage in a layout string.

    Raises:
        ConfigError: the string is malformed, or ``E`` and ``L`` are not its two ends.
    """
    symbols = _written_out(layout)
    if "m" in symbols:
        raise ConfigError(
            f"{_KEY} {layout!r} places a multi-token prediction layer (m), but every stage "
            "computes these (model.mtp_num_layers): leave m out"
        )
    inner = symbols.removeprefix("E").removesuffix("L")
    if len(symbols) - len(inner) != 2 or "E" in inner or "L" in inner:
        raise ConfigError(
            f"{_KEY} {layout!r} must begin with its only E (embedding) and end with its only L "
            f"(output layer and loss), as in {layout_text([1, 2, 2, 1])!r}"
        )
    return [len(stage) for stage in inner.split("|")]


def layout_text(counts: Sequence[int]) -> str:
    """The layout string of virtual stages with these numbers of layers."""
    first, *middle, last = [_repeated("t", count) for count in counts]
    text = f"E{first}|"
    for stage, alike in groupby(middle):
        repeats = len(list(alike))
        text += f"{stage}|" if repeats == 1 else f"({stage}|)*{repeats}"
    return f"{text}{last}L"


def balanced(num_layers: int, virtual: int) -> list[int]:
    """Layers of each virtual stage, as even as can be; the middle ones take what is left over."""
    counts = [num_layers // virtual] * virtual
    order = [*range(1, virtual - 1), 0, virtual - 1]
    for stage in order[: num_layers % virtual]:
        counts[stage] += 1
    return counts


def _repeated(symbol: str, count: int) -> str:
    return symbol * count if count <= 2 else f"{symbol}*{count}"


def _fix(num_layers: int, virtual: int) -> str:
    """The value of the layout key that would fit."""
    if virtual == 1:
        return f"{_KEY} to null"
    if num_layers % virtual == 0:
        return f"{_KEY} to null (even), or for example {_example(num_layers, virtual)}"
    return f"{_KEY} to for example {_example(num_layers, virtual)}"


def _example(num_layers: int, virtual: int) -> str:
    return repr(layout_text(balanced(num_layers, virtual)))


def _to_place(num_layers: int, before: int, block: int) -> str:
    if not before and block == 1:
        return f"model.num_layers is {num_layers}"
    things = "layers" if block == 1 else f"blocks of {block}"
    return f"model.num_layers {before + num_layers * block} has {num_layers} {things} to place"


def _uneven(num_layers: int, stages: int, chunks: int, before: int, block: int) -> str:
    virtual = stages * chunks
    below = num_layers // virtual * virtual
    sizes = " or ".join(str(before + count * block) for count in (below, below + virtual) if count)
    what = f"model.num_layers {num_layers} is"
    if before or block > 1:
        what = f"{_to_place(num_layers, before, block)}, which is"
    uneven = ""
    if num_layers > virtual:
        uneven = f", or place them unevenly: {_KEY}={_example(num_layers, virtual)}"
    return (
        f"{what} not a multiple of parallel.pipeline {stages} × "
        f"parallel.virtual_pipeline {chunks} = {virtual}: set model.num_layers to {sizes}, or "
        f"another number of stages{uneven}"
    )


def _written_out(layout: str) -> str:
    """A layout string without repetitions, commas and spaces."""
    text = "".join(layout.replace(",", "").split())

    def wrong(position: int, what: str) -> ConfigError:
        return ConfigError(
            f"{_KEY} {layout!r}: {what} at {text[position:] or 'the end'!r}; it is made of E, t, L "
            "and |, with x*n or (...)*n for repetition"
        )

    # One list of pieces per open parenthesis; the last piece is what a "*" repeats.
    open_groups: list[list[str]] = [[]]
    position = 0
    while position < len(text):
        symbol = text[position]
        if symbol == "(":
            open_groups.append([])
        elif symbol == ")":
            if len(open_groups) == 1:
                raise wrong(position, "no ( before )")
            group = "".join(open_groups.pop())
            open_groups[-1].append(group)
        elif symbol == "*":
            digits = position + 1
            while digits < len(text) and text[digits] in "0123456789":
                digits += 1
            number = text[position + 1 : digits]
            if not number or not open_groups[-1]:
                raise wrong(position, "* needs a symbol before it and a number after it")
            if len(number) > 6 or int(number) * len(open_groups[-1][-1]) > _LONGEST:
                raise wrong(position, "too many repetitions")
            open_groups[-1][-1] *= int(number)
            position = digits - 1
        elif symbol in "EtmL|":
            open_groups[-1].append(symbol)
        else:
            raise wrong(position, f"unknown symbol {symbol!r}")
        position += 1
    if len(open_groups) > 1:
        raise wrong(len(text), "( without )")
    return "".join(open_groups[0])
