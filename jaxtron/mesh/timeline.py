"""The timeline of a configuration's pipeline, as text."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from jaxtron.config.batch import batch_layout
from jaxtron.config.config import Config
from jaxtron.errors import ConfigError
from jaxtron.mesh.text import range_text, table
from jaxtron.parallel.pipeline.layout import Placement, place_layers
from jaxtron.parallel.pipeline.registry import make_schedule
from jaxtron.parallel.pipeline.schedule import Cell, Schedule, Unit

_WIDTH = 100
_BLOCKS = 8  # most blocks of ticks; those in the middle are left out


@dataclass(frozen=True)
class Timeline:
    """A schedule and the layers that its stages run.

    Attributes:
        name: ``parallel.pipeline_schedule``.
        schedule: its table.
        placement: layers of every stage and chunk.
    """

    name: str
    schedule: Schedule
    placement: Placement

    @property
    def bubble(self) -> Fraction:
        """Idle over useful time with these layers; a backward takes twice its forward."""
        return self.schedule.bubble(work=self.placement.counts)

    def title(self) -> str:
        """The schedule and its sizes in a line."""
        table = self.schedule
        return (
            f"{self.name}: {table.stages} stages × {table.chunks} chunk"
            f"{'s' if table.chunks > 1 else ''}, {table.microbatches} microbatches, "
            f"{len(table.ticks)} ticks"
        )

    def unit_text(self, unit: Unit) -> str:
        """``3``, or ``3.1`` for chunk 1 where a stage has several."""
        return f"{unit.microbatch}" + (f".{unit.chunk}" if self.schedule.chunks > 1 else "")


def make_timeline(config: Config, axes: Mapping[str, int]) -> Timeline:
    """The timeline of a step of ``config``.

    Args:
        config: a configuration that :func:`jaxtron.config.validate.validate` accepts.
        axes: size of each mesh axis.

    Raises:
        ConfigError: there is one stage alone.
    """
    parallel, stages = config.parallel, axes["pipeline"]
    if stages == 1:
        raise ConfigError(
            "parallel.pipeline is 1, so there is no pipeline schedule to show: set "
            "parallel.pipeline to 2 or more"
        )
    chunks = parallel.virtual_pipeline
    return Timeline(
        name=parallel.pipeline_schedule,
        schedule=make_schedule(
            parallel.pipeline_schedule,
            stages,
            chunks,
            batch_layout(config, axes).num_microbatches,
        ),
        placement=place_layers(
            config.model.stacked_blocks, stages, chunks, parallel.pipeline_layout
        ),
    )


def render_timeline(timeline: Timeline) -> str:
    """Rows of stages over columns of ticks, the bubble, and what each stage holds."""
    bubble = timeline.bubble
    return "\n\n".join(
        [
            timeline.title(),
            "\n\n".join(_blocks(timeline)),
            f"bubble {bubble} = {float(bubble):.1%} of the useful time "
            "(idle over useful; a backward takes twice its forward)",
            _stages(timeline),
        ]
    )


def _stages(timeline: Timeline) -> str:
    schedule, placement = timeline.schedule, timeline.placement
    rows = [["stage", "slots", "microbatches in flight", "layers", "which (chunk by chunk)"]]
    for stage, slots in enumerate(schedule.slots):
        in_flight = max(len({unit.microbatch for unit in held}) for held in schedule.held(stage))
        chunks = placement.layers[stage]
        which = "  ".join(range_text(chunk) for chunk in chunks)
        total = sum(map(len, chunks))
        rows.append([str(stage), str(slots), str(in_flight), str(total), which])
    return table(rows, right=range(4)) + (
        "\na slot keeps the residuals of one chunk of one microbatch from its forward to its "
        "backward"
    )


def _blocks(timeline: Timeline) -> Iterator[str]:
    """The table cut into blocks of ticks that fit a terminal's width.

    A tick is as wide as it is long: a half that no stage uses takes no column.
    """
    schedule = timeline.schedule
    longest = Unit(schedule.microbatches - 1, schedule.chunks - 1)
    width = len(timeline.unit_text(longest)) + 1
    label = len(f"stage {schedule.stages - 1}")
    columns = []
    for number, row in enumerate(schedule.ticks):
        halves = [_half(timeline, row, what) for what in ("forward", "backward")]
        used = [half for half in halves if any(half)]
        cells = [" ".join((cell or "·").ljust(width) for cell in cells) for cells in zip(*used)]
        columns.append([str(number).ljust(len(cells[0])), *cells])
    heads = ["tick", *(f"stage {stage}" for stage in range(schedule.stages))]
    blocks: list[list[list[str]]] = [[]]
    room = _WIDTH - label
    for column in columns:
        if blocks[-1] and sum(len(c[0]) + 3 for c in [*blocks[-1], column]) > room:
            blocks.append([])
        blocks[-1].append(column)
    texts = [
        "\n".join(
            f"{head.ljust(label)} | " + " | ".join(column[line] for column in block) + " |"
            for line, head in enumerate(heads)
        )
        for block in blocks
    ]
    if len(texts) > _BLOCKS:
        hidden = blocks[_BLOCKS // 2 : -(_BLOCKS // 2)]
        count = sum(map(len, hidden))
        texts[_BLOCKS // 2 : -(_BLOCKS // 2)] = [f"… {count} ticks (all of them with --svg)"]
    yield from texts


def _half(timeline: Timeline, row: tuple[Cell, ...], what: str) -> list[str]:
    """``F3`` or ``B3`` for every stage; empty where it idles."""
    units: list[Unit | None] = [getattr(cell, what) for cell in row]
    letter = what[0].upper()
    return ["" if unit is None else letter + timeline.unit_text(unit) for unit in units]
