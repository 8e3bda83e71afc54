"""Where device time goes, from a trace of JAX's profiler."""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxtron.errors import DataError

# The first pattern found in a kernel's name decides; what matches none is other compute.
KINDS: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|collective|nvshmem|MemcpyP2P"),
    ("attention", r"cudnn|fmha|flash|attention"),
    ("gemm", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("copy", r"memcpy|memset|copy"),
)
OTHER = "other compute"
COLLECTIVES = re.compile(r"AllGather|ReduceScatter|AllReduce|SendRecv|Broadcast|MemcpyP2P")

Span = tuple[float, float]


class Kernel(NamedTuple):
    """A kernel of a trace.

    Attributes:
        start: in seconds.
        end: in seconds.
        name: of the kernel.
        instruction: of the compiled program that it was launched for; empty if it is not told.
    """

    start: float
    end: float
    name: str
    instruction: str


@dataclass(frozen=True)
class Breakdown:
    """Time of one device over a trace, in seconds.

    Attributes:
        total: from the first kernel to the end of the last.
        busy: per kind, the sum of its kernels' times; kinds may overlap.
        computing: time in which anything but communication ran.
        exposed_communication: time in which communication ran and nothing else did.
        exposed: of it, by the collective's name; two at a time count for both.
        idle: time in which nothing ran.
        kernels: total time and count per kernel name, longest first.
    """

    total: float
    busy: dict[str, float]
    computing: float
    exposed_communication: float
    exposed: dict[str, float]
    idle: float
    kernels: list[tuple[str, float, int]]

    def lines(self, steps: int, top: int = 0) -> list[str]:
        """A table in milliseconds per step."""

        def row(name: str, seconds: float) -> str:
            share = 100 * seconds / self.total if self.total else 0.0
            return f"{name:26s} {1e3 * seconds / steps:9.2f} ms {share:5.1f} %"

        rows = [row("device time", self.total)]
        rows += [row(kind, t) for kind, t in sorted(self.busy.items(), key=lambda i: -i[1])]
        rows.append(row("exposed communication", self.exposed_communication))
        longest_first = sorted(self.exposed.items(), key=lambda i: -i[1])
        rows += [row(f"  {name}", t) for name, t in longest_first if t > 0]
        rows.append(row("idle", self.idle))
        for name, seconds, count in self.kernels[:top]:
            rows.append(f"{1e3 * seconds / steps:9.3f} ms {count / steps:7.1f} x {name[:110]}")
        return rows


def kind_of(kernel: str) -> str:
    """Kind of a kernel by its name."""
    for kind, pattern in KINDS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return OTHER


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans merged where they overlap, ascending."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in union(spans))


def device_kernels(
    events: Iterable[Mapping[str, Any]],
) -> dict[int, list[Kernel]]:
    """Per GPU of the traced process, its kernels.

    Args:
        events: of a trace in Chrome's format, times in microseconds.
    """
    events = list(events)
    streams = {
        (e["pid"], e.get("tid"))
        for e in events
        if e.get("ph") == "M"
        and e.get("name") == "thread_name"
        and e["args"]["name"].startswith("Stream")
    }
    devices = {
        e["pid"]: int(found[1])
        for e in events
        if e.get("ph") == "M"
        and e.get("name") == "process_name"
        and (found := re.search(r"/device:GPU:(\d+)", e["args"]["name"]))
    }
    kernels: dict[int, list[Kernel]] = defaultdict(list)
    for e in events:
        if e.get("ph") == "X" and e["pid"] in devices and (e["pid"], e["tid"]) in streams:
            start = e["ts"] * 1e-6
            instruction = str(e.get("args", {}).get("hlo_op", ""))
            kernels[devices[e["pid"]]].append(
                Kernel(start, start + e["dur"] * 1e-6, e["name"], instruction)
            )
    return dict(kernels)


def kernels_of(events: Iterable[Mapping[str, Any]], device: int = 0) -> list[Kernel]:
    """Those of one GPU of the traced process.

    Raises:
        DataError: the trace has none.
    """
    kernels = device_kernels(events).get(device)
    if kernels is None:
        raise DataError(f"the trace has no kernels of GPU {device}: it must come from a GPU run")
    return kernels


def breakdown(events: Iterable[Mapping[str, Any]], device: int = 0) -> Breakdown:
    """Break down one GPU's kernels.

    Args:
        events: as of :func:`device_kernels`.
        device: which GPU of the traced process.

    Raises:
        DataError: the trace has no kernels of that device.
    """
    spans: dict[str, list[Span]] = defaultdict(list)
    collectives: dict[str, list[Span]] = defaultdict(list)
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for start, end, name, _ in kernels_of(events, device):
        kind = kind_of(name)
        spans[kind].append((start, end))
        if kind == "communication":
            found = COLLECTIVES.search(name)
            collectives[found[0] if found else "other"].append((start, end))
        by_name[name][0] += end - start
        by_name[name][1] += 1
    everything = [span for kind in spans.values() for span in kind]
    compute = [span for kind, each in spans.items() if kind != "communication" for span in each]
    total = max(end for _, end in everything) - min(start for start, _ in everything)
    ranked = sorted(by_name.items(), key=lambda item: -item[1][0])
    computing = _length(compute)
    exposed = {name: _length([*compute, *each]) - computing for name, each in collectives.items()}
    return Breakdown(
        total=total,
        busy={kind: sum(end - start for start, end in each) for kind, each in spans.items()},
        computing=computing,
        exposed_communication=_length(everything) - computing,
        exposed=exposed,
        idle=total - _length(everything),
        kernels=[(name, seconds, int(count)) for name, (seconds, count) in ranked],
    )


def by_device(events: Iterable[Mapping[str, Any]], steps: int) -> list[str]:
    """A line for each GPU of the traced process, of several: which of them waits for others.

    A card that computes faster than the rest shows more exposed communication.
    """
    events = list(events)
    devices = sorted(device_kernels(events))
    if len(devices) < 2:
        return []
    rows = [f"{'ms of a step':26s} {'computing':>10s} {'exposed':>10s} {'idle':>10s}"]
    for device in devices:
        found = breakdown(events, device)
        times = (found.computing, found.exposed_communication, found.idle)
        rows.append(f"{f'GPU {device}':26s} " + " ".join(f"{1e3 * t / steps:10.2f}" for t in times))
    return rows


def read_trace(folder: Path) -> list[dict[str, Any]]:
    """Events of the newest trace under ``folder``.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda f: f.stat().st_mtime)
    if not files:
        raise DataError(f"{folder} holds no trace (*.trace.json.gz)")
    try:
        with gzip.open(files[-1], "rt") as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{files[-1]} is no trace, or only a part of one: {type(error).__name__}: {error}"
        ) from error
    return events
