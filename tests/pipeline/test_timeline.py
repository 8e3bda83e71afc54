"""``jaxtron mesh --schedule`` and ``--svg``, and what the configuration refuses."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from jaxtron.cli import run
from jaxtron.config.load import load_config
from jaxtron.config.validate import validate
from jaxtron.errors import ConfigError
from jaxtron.mesh.__main__ import main
from jaxtron.mesh.inspect import inspect_layout
from jaxtron.mesh.text import device_text
from jaxtron.mesh.timeline import make_timeline, render_timeline
from jaxtron.mesh.timeline_svg import timeline_svg

INTERLEAVED = [
    "parallel.pipeline=2",
    "parallel.virtual_pipeline=2",
    "parallel.pipeline_schedule=interleaved",
]


def timeline(*overrides):
    config = load_config("configs/tiny.yaml", ["parallel.fsdp=1", *overrides])
    return make_timeline(config, validate(config, config.parallel.pipeline))


def test_text_shows_stages_over_ticks():
    text = render_timeline(timeline("parallel.pipeline=2", "train.global_batch_size=3"))
    assert text.startswith("1f1b: 2 stages × 1 chunk, 3 microbatches, 5 ticks\n")
    assert "tick    | 0  | 1     | 2     | 3     | 4  |" in text
    assert "stage 0 | F0 | F1 ·  | F2 B0 | ·  B1 | B2 |" in text
    assert "stage 1 | ·  | F0 B0 | F1 B1 | F2 B2 | ·  |" in text
    assert "bubble 1/3 = 33.3%" in text
    assert re.search(r"\n +0 +3 +3 +2 +0:2\n +1 +1 +1 +2 +2:4\n", text)


def test_text_names_the_chunks_where_there_are_several():
    text = render_timeline(timeline(*INTERLEAVED, "train.global_batch_size=2"))
    assert "stage 0 | F0.0 | F1.0 | F0.1 | F1.1 " in text
    assert re.search(r"\n +0 +4 +2 +2 +0:1  2:3\n", text)  # 4 chunks of 2 microbatches


def test_text_of_a_long_schedule_leaves_ticks_out():
    text = render_timeline(timeline("parallel.pipeline=2", "train.global_batch_size=400"))
    shown = text.count("stage 1 | ")
    assert shown == 8 and re.search(r"… \d+ ticks", text)
    assert max(map(len, text.splitlines())) <= 100


def test_svg_has_a_box_for_every_unit_in_the_right_row_without_overlap():
    drawn = timeline("parallel.pipeline=2", "parallel.pipeline_layout=Et*3|tL")
    svg = ET.fromstring(timeline_svg(drawn))
    space = "{http://www.w3.org/2000/svg}"
    boxes = {}
    for group in svg.iter(f"{space}g"):
        stage = int(re.search(r"stage (\d)", group.find(f"{space}title").text)[1])
        box = group.find(f"{space}rect")
        boxes.setdefault(stage, []).append((float(box.get("x")), float(box.get("width"))))
    assert {stage: len(row) for stage, row in boxes.items()} == {0: 16, 1: 16}  # 8 F and 8 B
    for row in boxes.values():
        row.sort()
        for (x, width), (following, _) in pairwise(row):
            assert x + width <= following
    widths = [{round((width + 1) / 20) for _, width in boxes[stage]} for stage in (0, 1)]
    assert widths == [{3, 6}, {1, 2}]  # layers, twice for a backward


def test_command_prints_and_draws(tmp_path, capsys):
    path = tmp_path / "step.svg"
    arguments = ["--config", "configs/tiny.yaml", "parallel.pipeline=2"]
    assert run(main, [*arguments, "--schedule", "--svg", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1f1b: 2 stages") and out.endswith(f"wrote {path}\n")
    assert "device grid" not in out
    assert ET.parse(path).getroot().tag.endswith("svg")
    assert run(main, [*arguments, "--svg", str(tmp_path / "no" / "step.svg")]) == 2
    assert "--svg: cannot write" in capsys.readouterr().err
    assert run(main, ["--config", "configs/tiny.yaml", "--schedule"]) == 2
    assert "parallel.pipeline is 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides, words, fix",
    [
        # A rule that rounds down would build 8 of the 10 layers.
        (
            ["parallel.pipeline=4", "model.num_layers=10"],
            ["model.num_layers 10", "parallel.pipeline 4", "8 or 12", "Ett|(t*3|)*2ttL"],
            ["parallel.pipeline_layout=Ett|(ttt|)*2ttL"],
        ),
        (
            ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
            ["parallel.virtual_pipeline is 2", "1f1b"],
            ["parallel.pipeline_schedule=interleaved"],
        ),
        (
            [*INTERLEAVED, "train.global_batch_size=7"],
            ["7 microbatches", "parallel.pipeline 2", "6 or 8"],
            ["train.global_batch_size=8"],
        ),
        (
            ["parallel.pipeline=2", "parallel.pipeline_schedule=interleaved"],
            ["parallel.virtual_pipeline is 1", "1f1b"],
            ["parallel.virtual_pipeline=2"],
        ),
        (
            ["parallel.virtual_pipeline=2", "parallel.pipeline_schedule=interleaved"],
            ["parallel.virtual_pipeline is 2", "parallel.pipeline is 1"],
            ["parallel.pipeline=2"],
        ),
        (
            ["parallel.virtual_pipeline=0"],
            ["parallel.virtual_pipeline is 0"],
            ["parallel.virtual_pipeline=1"],
        ),
        (
            ["parallel.pipeline=2", "parallel.pipeline_schedule=1F1B"],
            ["parallel.pipeline_schedule is '1F1B'", "gpipe, 1f1b, interleaved"],
            ["parallel.pipeline_schedule=gpipe"],
        ),
        (
            ["parallel.pipeline=2", "parallel.pipeline_layout=Et|ttL"],
            ["places 3 layers", "model.num_layers is 4"],
            ["parallel.pipeline_layout=Et|tttL"],
        ),
    ],
)
def test_pipelines_that_do_not_fit_are_refused_with_a_fix_that_works(overrides, words, fix):
    config = load_config("configs/tiny.yaml", ["parallel.fsdp=1", *overrides])
    with pytest.raises(ConfigError) as caught:
        validate(config, config.parallel.pipeline)
    assert len(str(caught.value).splitlines()) == 1
    for word in words:
        assert word in str(caught.value)
    fixed = load_config("configs/tiny.yaml", ["parallel.fsdp=1", *overrides, *fix])
    validate(fixed, fixed.parallel.pipeline)


def test_inspection_shows_the_layers_of_every_chunk_of_a_stage():
    inspection = inspect_layout(load_config("configs/tiny.yaml", INTERLEAVED), 2)
    assert re.search(r"layers/mlp/up +\[0:1\+2:3, ", device_text(inspection, 0))
    assert re.search(r"layers/mlp/up +\[1:2\+3:4, ", device_text(inspection, 1))
    layout = ["parallel.pipeline=2", "parallel.pipeline_layout=Et*3|tL"]
    inspection = inspect_layout(load_config("configs/tiny.yaml", layout), 2)
    assert re.search(r"layers/mlp/up +\[3:4, ", device_text(inspection, 1))
    [up] = [p for p in inspection.params if p.name == "layers/mlp/up"]
    assert up.stored[0] == 3 and up.shape[0] == 4  # room for the fullest; 4 layers counted
