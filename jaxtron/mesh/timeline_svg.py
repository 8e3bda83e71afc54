"""The timeline of a pipeline as an SVG picture, true to scale in time."""

import colorsys
from html import escape

from jaxtron.mesh.timeline import Timeline
from jaxtron.parallel.pipeline.schedule import Unit

_HUES = {"forward": 212, "backward": 152}
_COSTS = {"forward": 1, "backward": 2}  # of a layer
_ROW = 34  # pixels a stage is high
_LEFT, _TOP, _BOTTOM = 84, 64, 78
_GAP = 6


def timeline_svg(timeline: Timeline) -> str:
    """A picture of a step: a row a stage, a box a unit as wide as it takes time.

    Colour tells forwards from backwards and its shade the chunk; what is left of a row is idle.
    """
    schedule, counts = timeline.schedule, timeline.placement.counts
    # The narrowest box has room for its number.
    least = min(count for chunks in counts for count in chunks if count)
    digits = len(timeline.unit_text(Unit(schedule.microbatches - 1, schedule.chunks - 1)))
    scale = max(20, 7 * digits + 8) / least
    boxes, rules, now = [], [], 0.0
    lengths = schedule.half_lengths(_COSTS["forward"], _COSTS["backward"], counts)
    every = max(1, 44 // max(1, round(scale * least)))
    for number, (row, halves) in enumerate(zip(schedule.ticks, lengths, strict=True)):
        x = _LEFT + now * scale
        if number % every == 0:
            rules.append(
                f'<path d="M{x:.1f} {_TOP - 6}v{_ROW * schedule.stages + 6}"/>'
                f'<text x="{x + 2:.1f}" y="{_TOP - 10}">{number}</text>'
            )
        for what, length in zip(("forward", "backward"), halves, strict=True):
            for stage, cell in enumerate(row):
                unit: Unit | None = getattr(cell, what)
                if unit is not None and (layers := counts[stage][unit.chunk]):
                    width = layers * _COSTS[what] * scale
                    boxes.append(_box(timeline, what, stage, unit, now * scale, width, number))
            now += float(length)
    across = now * scale
    width = max(_LEFT + across + 20, 760)
    foot = _TOP + _ROW * schedule.stages
    stages = "".join(
        f'<text class="n" x="14" y="{_TOP + _ROW * (i + 0.5) + 4:.1f}">stage {i}</text>'
        f'<rect class="idle" x="{_LEFT}" y="{_TOP + _ROW * i + 2}" width="{across:.1f}" '
        f'height="{_ROW - 4}"/>'
        for i in range(schedule.stages)
    )
    bubble = timeline.bubble
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{foot + _BOTTOM}" '
        f'viewBox="0 0 {width:.0f} {foot + _BOTTOM}">\n'
        "<style>text{font:11px system-ui,sans-serif;fill:#5b6470}.t{font-size:15px;fill:#1c2430}"
        ".n{font-size:12px;fill:#1c2430}.u{text-anchor:middle;fill:#1c2430}.w{fill:#fff}.idle{fill:#eef0f3}"
        "path{stroke:#c9ced6;stroke-width:1}</style>\n"
        f'<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text class="t" x="14" y="26">{escape(timeline.title())}, bubble '
        f"{float(bubble):.1%}</text>\n"
        f'<text x="14" y="{_TOP - 10}">tick</text>\n'
        f"{stages}\n{''.join(rules)}\n" + "\n".join(boxes) + f"\n{_legend(timeline, foot)}</svg>\n"
    )


def _colour(what: str, chunk: int, chunks: int) -> tuple[str, bool]:
    """Fill of a box, the later chunk the darker, and whether its text must be white."""
    light = 72 - (36 * chunk / (chunks - 1) if chunks > 1 else 24)
    # as hex digits: not every program that draws SVG knows hsl()
    parts = colorsys.hls_to_rgb(_HUES[what] / 360, light / 100, 0.55)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts), light < 60


def _box(
    timeline: Timeline, what: str, stage: int, unit: Unit, at: float, width: float, tick: int
) -> str:
    fill, dark = _colour(what, unit.chunk, timeline.schedule.chunks)
    x, y = _LEFT + at, _TOP + _ROW * stage + 2
    return (
        f"<g><title>tick {tick}, stage {stage}: {what} of microbatch {unit.microbatch}, "
        f"chunk {unit.chunk}</title>"
        f'<rect x="{x + 0.5:.1f}" y="{y}" width="{width - 1:.1f}" height="{_ROW - 4}" rx="2" '
        f'fill="{fill}"/><text class="u{" w" if dark else ""}" x="{x + width / 2:.1f}" '
        f'y="{y + _ROW / 2 + 2:.1f}">{timeline.unit_text(unit)}</text></g>'
    )


def _legend(timeline: Timeline, foot: float) -> str:
    chunks = timeline.schedule.chunks
    parts, x, y = [], 14, foot + 18
    for what in ("forward", "backward"):
        for chunk in range(chunks):
            fill, _ = _colour(what, chunk, chunks)
            label = what + (f", chunk {chunk}" if chunks > 1 else "")
            parts.append(
                f'<rect x="{x}" y="{y}" width="14" height="14" rx="2" fill="{fill}"/>'
                f'<text x="{x + 14 + _GAP}" y="{y + 11}">{label}</text>'
            )
            x += 44 + 6 * len(label)
    parts.append(
        f'<rect class="idle" x="{x}" y="{y}" width="14" height="14" rx="2"/>'
        f'<text x="{x + 14 + _GAP}" y="{y + 11}">idle</text>'
    )
    label = "microbatch.chunk" if chunks > 1 else "microbatch"
    parts.append(
        f'<text x="14" y="{y + 38}">Numbers: {label}. Widths: time, a backward twice its forward; '
        "messages move at the end of every half of a tick.</text>"
    )
    return "".join(parts)
