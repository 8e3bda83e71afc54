"""The picture of a schedule above a hand-made profile."""

import re
import xml.etree.ElementTree as ET

import pytest

from jaxtron.bench.__main__ import main
from jaxtron.bench.timeline import measured_timeline
from jaxtron.cli import run
from jaxtron.config.load import load_config
from jaxtron.config.validate import validate
from jaxtron.errors import DataError
from jaxtron.mesh.timeline import Timeline, make_timeline

SPACE = "{http://www.w3.org/2000/svg}"
LEFT, WIDTH = 84, 1500


def timeline() -> Timeline:
    """1f1b of 2 microbatches on 2 stages: F, FB, FB, B; 9 units of time with B = 2 F."""
    overrides = ["parallel.fsdp=1", "parallel.pipeline=2", "train.global_batch_size=2"]
    config = load_config("configs/tiny.yaml", overrides)
    return make_timeline(config, validate(config, 2))


def meta(device: int) -> list[dict]:
    stream = {"ph": "M", "pid": device, "name": "thread_name"}
    return [
        {
            "ph": "M",
            "pid": device,
            "name": "process_name",
            "args": {"name": f"/device:GPU:{device}"},
        },
        {**stream, "tid": 7, "args": {"name": "Stream #7(Compute)"}},
        {**stream, "tid": 8, "args": {"name": "Stream #8(Compute)"}},
    ]


def kernel(device: int, name: str, start: float, length: float, tid: int = 7) -> dict:
    return {"ph": "X", "pid": device, "tid": tid, "name": name, "ts": start, "dur": length}


# GPU 1 computes for 900 us of 1000, which sets the scale of the prediction: 100 us a unit
EVENTS = [
    *meta(0),
    kernel(0, "nvjet_tst_128x256", 0, 400),
    kernel(0, "ncclDevKernel_SendRecv", 400, 100, tid=8),
    *meta(1),
    kernel(1, "nvjet_tst_128x256", 0, 600),
    kernel(1, "fused_add", 700, 300),
]


def rectangles(svg: ET.Element, fill: str) -> list[tuple[float, float]]:
    """Where rectangles of a colour begin and end, in microseconds; not those of the legend."""
    found = [
        r for r in svg.iter(f"{SPACE}rect") if r.get("fill") == fill and float(r.get("x")) >= LEFT
    ]
    spans = [(float(r.get("x")) - LEFT, float(r.get("width"))) for r in found if r.get("rx") != "2"]
    spans += [
        (float(r.get("x")) - LEFT - 0.5, float(r.get("width")) + 1)
        for r in found
        if r.get("rx") == "2" and r.get("height") != "14"
    ]
    return sorted((x * 1000 / WIDTH, (x + w) * 1000 / WIDTH) for x, w in spans)


def test_a_prediction_as_long_as_the_busiest_gpu_computed_stands_above_the_kernels() -> None:
    svg = ET.fromstring(measured_timeline(timeline(), EVENTS))

    def near(spans: list[tuple[float, float]]) -> list:
        return [pytest.approx(span, abs=0.2) for span in spans]

    # stage 0: F0 at 0, F1 at 100; stage 1: F0 at 100, F1 at 400
    assert rectangles(svg, "#8fb3e8") == near([(0, 100), (100, 200), (100, 200), (400, 500)])
    # stage 0: B0 at 500, B1 at 700; stage 1: B0 at 200, B1 at 500
    assert rectangles(svg, "#7fcf9f") == near([(200, 400), (500, 700), (500, 700), (700, 900)])
    assert rectangles(svg, "#4a78c2") == near([(0, 400), (0, 600)])
    assert rectangles(svg, "#a9b4c4") == near([(700, 1000)])
    text = "".join(d.text for d in svg.iter(f"{SPACE}desc"))
    assert re.findall(r"GPU (\d): ([\d.]+) ms of \w+ beside nothing, ([\d.]+) ms idle", text) == [
        ("0", "0.1", "0.5"),
        ("1", "0.0", "0.1"),
    ]


def test_a_trace_with_other_gpus_is_refused() -> None:
    with pytest.raises(DataError, match=r"kernels of GPUs \[0\], .* needs one GPU for each"):
        measured_timeline(timeline(), [e for e in EVENTS if e["pid"] == 0])


def test_several_steps_are_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "profile",
        "--config",
        "configs/tiny.yaml",
        "--timeline",
        "x.svg",
        "parallel.pipeline=2",
    ]
    assert run(main, argv) == 2
    assert "--traced-steps is 2: give --traced-steps 1" in capsys.readouterr().err
