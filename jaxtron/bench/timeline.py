"""A pipeline's schedule and a profile of it, one above the other, as an SVG picture."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from html import escape
from typing import Any

from jaxtron.bench.breakdown import Kernel, Span, device_kernels, kind_of, union
from jaxtron.errors import DataError
from jaxtron.mesh.timeline import Timeline

Kernels = list[Kernel]

_FORWARD, _BACKWARD = 1, 2  # of a layer
_HALVES = {"forward": "#8fb3e8", "backward": "#7fcf9f"}
_KINDS = {
    "gemm": "#4a78c2",
    "attention": "#8a6fc0",
    "other compute": "#a9b4c4",
    "copy": "#a9b4c4",
    "communication": "#e0823d",
}
_WIDTH, _LEFT, _TOP, _ROW, _GAP = 1500, 84, 70, 34, 34
_STYLE = (
    "<style>text{font:11px system-ui,sans-serif;fill:#5b6470}.t{font-size:15px;fill:#1c2430}"
    ".n{font-size:12px;fill:#1c2430}.u{text-anchor:middle;fill:#1c2430}.idle{fill:#eef0f3}"
    "path{stroke:#c9ced6;stroke-width:1}</style>"
)


def measured_timeline(timeline: Timeline, events: Iterable[Mapping[str, Any]]) -> str:
    """A picture of one step: what the schedule predicts for each stage, and what each GPU did.

    The prediction has one number out of the profile: all halves of ticks together last as long as
    the busiest GPU computed. So where the profile is longer than the prediction, something was not
    hidden: communication in which nothing else ran, or nothing at all.

    Args:
        timeline: of the configuration that ran, one GPU a stage.
        events: of a trace of one step, in Chrome's format.

    Raises:
        DataError: the trace has not one GPU for each stage.
    """
    kernels = device_kernels(events)
    stages = timeline.schedule.stages
    if sorted(kernels) != list(range(stages)):
        raise DataError(
            f"the trace has kernels of GPUs {sorted(kernels)}, but the timeline of {stages} stages "
            f"needs one GPU for each: profile with parallel.pipeline={stages} alone, on "
            f"{stages} GPUs of one process"
        )
    begin = min(start for each in kernels.values() for start, *_ in each)
    end = max(stop for each in kernels.values() for _, stop, *_ in each)
    scale = _WIDTH / (end - begin)
    busy = max(_length(_of_kinds(each, compute=True)) for each in kernels.values())
    foot = _TOP + (2 * stages) * _ROW + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" '
        f'height="{foot + 70}" viewBox="0 0 {_LEFT + _WIDTH + 20} {foot + 70}">',
        _STYLE,
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="t" x="14" y="26">{escape(timeline.title())}: the schedule, and a profile of '
        f"{1e3 * (end - begin):.0f} ms</text>",
        *_axis(end - begin, scale, stages),
        *_prediction(timeline, busy, scale),
    ]
    for device, each in sorted(kernels.items()):
        parts += _device(device, each, begin, end, scale, _TOP + (stages + device) * _ROW + _GAP)
    parts += [*_legend(foot), "</svg>"]
    return "\n".join(parts) + "\n"


def _of_kinds(kernels: Kernels, compute: bool) -> list[Span]:
    return [(a, b) for a, b, name, _ in kernels if (kind_of(name) != "communication") == compute]


def _length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in union(spans))


def _joined(spans: Iterable[Span], gap: float) -> list[Span]:
    """Spans merged where nothing of them, or less than ``gap``, lies between."""
    return [(start, stop - gap) for start, stop in union((a, b + gap) for a, b in spans)]


def _axis(length: float, scale: float, stages: int) -> list[str]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if 1e3 * length <= 20 * s)
    down = 2 * stages * _ROW + _GAP + 6
    marks = range(0, int(1e3 * length) + 1, step)
    return [
        f'<path d="M{_LEFT + scale * ms / 1e3:.1f} {_TOP - 6}v{down}"/>'
        f'<text x="{_LEFT + scale * ms / 1e3 + 2:.1f}" y="{_TOP - 10}">{ms} ms</text>'
        for ms in marks
    ]


def _row(name: str, top: float, length: float) -> str:
    return (
        f'<text class="n" x="14" y="{top + _ROW / 2 + 4:.1f}">{name}</text>'
        f'<rect class="idle" x="{_LEFT}" y="{top + 2:.1f}" width="{length:.1f}" '
        f'height="{_ROW - 4}"/>'
    )


def _prediction(timeline: Timeline, busy: float, scale: float) -> list[str]:
    schedule, counts = timeline.schedule, timeline.placement.counts
    lengths = list(schedule.half_lengths(_FORWARD, _BACKWARD, counts))
    unit = busy / float(sum(map(sum, lengths), Fraction(0)))
    rows = [_row(f"stage {i}", _TOP + i * _ROW, busy * scale) for i in range(schedule.stages)]
    now = 0.0
    for row, halves in zip(schedule.ticks, lengths, strict=True):
        for what, cost, length in zip(_HALVES, (_FORWARD, _BACKWARD), halves, strict=True):
            for stage, cell in enumerate(row):
                work = getattr(cell, what)
                if work is None or not counts[stage][work.chunk]:
                    continue
                x = _LEFT + now * scale
                width = counts[stage][work.chunk] * cost * unit * scale
                y = _TOP + stage * _ROW + 2
                rows.append(
                    f'<rect x="{x + 0.5:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" '
                    f'height="{_ROW - 4}" rx="2" fill="{_HALVES[what]}"/>'
                )
                text = timeline.unit_text(work)
                if width > 7 * len(text) + 4:
                    rows.append(
                        f'<text class="u" x="{x + width / 2:.1f}" y="{y + 19}">{text}</text>'
                    )
            now += float(length) * unit
    return rows


def _device(
    device: int, kernels: Kernels, begin: float, end: float, scale: float, top: float
) -> list[str]:
    """What a GPU did; communication is drawn full high where nothing else ran, else as a strip."""
    rows = [_row(f"GPU {device}", top, (end - begin) * scale)]
    by_kind: dict[str, list[Span]] = {kind: [] for kind in _KINDS}
    for start, stop, name, _ in kernels:
        by_kind[kind_of(name)].append((start, stop))
    for kind in ("communication", "other compute", "copy", "attention", "gemm"):
        for start, stop in _joined(by_kind[kind], 0.3 / scale):
            rows.append(
                f'<rect x="{_LEFT + (start - begin) * scale:.2f}" y="{top + 2:.1f}" '
                f'width="{(stop - start) * scale:.2f}" height="{_ROW - 4}" fill="{_KINDS[kind]}"/>'
            )
    for start, stop in _joined(by_kind["communication"], 0.3 / scale):
        rows.append(
            f'<rect x="{_LEFT + (start - begin) * scale:.2f}" y="{top + _ROW - 8:.1f}" '
            f'width="{(stop - start) * scale:.2f}" height="6" fill="{_KINDS["communication"]}"/>'
        )
    exposed = _length([(a, b) for a, b, *_ in kernels]) - _length(_of_kinds(kernels, compute=True))
    idle = end - begin - _length([(a, b) for a, b, *_ in kernels])
    rows.append(
        f"<desc>GPU {device}: {1e3 * exposed:.1f} ms of communication beside nothing, "
        f"{1e3 * idle:.1f} ms idle</desc>"
    )
    return rows


def _legend(foot: float) -> list[str]:
    entries = [("forward", _HALVES["forward"]), ("backward", _HALVES["backward"])]
    entries += [
        ("GEMM", _KINDS["gemm"]),
        ("attention", _KINDS["attention"]),
        ("other kernels", _KINDS["copy"]),
        ("communication (full height: beside nothing)", _KINDS["communication"]),
        ("idle", "#eef0f3"),
    ]
    parts, x = [], 14.0
    for label, fill in entries:
        parts.append(
            f'<rect x="{x}" y="{foot + 16}" width="14" height="14" rx="2" fill="{fill}"/>'
            f'<text x="{x + 20}" y="{foot + 27}">{label}</text>'
        )
        x += 48 + 6 * len(label)
    parts.append(
        f'<text x="14" y="{foot + 54}">Above: microbatches in the schedule, all together as '
        "long as the busiest GPU computed. Below: kernels. A stage without a unit computes along "
        "with the others and drops the result.</text>"
    )
    return parts
