"""The three forms of an inspection: text, prompt and page; and the command line."""

import json
import re

import pytest

from jaxtron.cli import run
from jaxtron.config.load import load_config
from jaxtron.mesh.__main__ import main
from jaxtron.mesh.inspect import inspect_layout
from jaxtron.mesh.page import page
from jaxtron.mesh.prompt import answer, prompt
from jaxtron.mesh.text import bytes_text, grid_text, render


@pytest.fixture(scope="module")
def inspection():
    return inspect_layout(load_config("configs/tiny.yaml", ["parallel.tensor=2"]), 8)


def test_text_has_a_line_for_every_axis_parameter_and_level(inspection):
    lines = render(inspection).splitlines()
    start = {line.split()[0]: line for line in reversed(lines) if line.strip()}
    for axis in ("pipeline", "data", "fsdp", "expert", "context", "tensor"):
        assert start[axis].split()[1] == str(inspection.sizes[axis])
    query = " ".join(start["layers/attention/query"].split())
    assert query == (
        "layers/attention/query layers, embed, heads, head_dim 4×64×8×8 "
        "P(None, 'fsdp', 'tensor', None) 4×16×4×8 8,192"
    )
    assert start["optim"].split()[1] == "*" and "optim_grads_params" in start


def test_columns_are_aligned(inspection):
    text = render(inspection)
    block = text.split("\n\nparameters\n")[1].split("\nfp32 master")[0].splitlines()
    assert len({len(line) for line in block}) == 1  # the last column is aligned to the right


def test_grid_shows_every_device_of_a_small_mesh_in_its_place(inspection):
    rows = [list(map(int, line.split())) for line in grid_text(inspection).splitlines()[1:]]
    assert rows == [[fsdp, 2 * fsdp, 2 * fsdp + 1] for fsdp in range(4)]


def test_grid_breaks_a_long_axis_and_leaves_rows_out():
    config = load_config("configs/tiny.yaml", ["train.global_batch_size=400"])
    lines = grid_text(inspect_layout(config, 400)).splitlines()
    assert lines[1].split() == ["0", *map(str, range(16))]
    assert lines[-1].split() == ["384", *map(str, range(384, 400))]
    assert "… 9 rows" in lines[9]


def test_prompt_answers_about_parameters_axes_dimensions_and_devices(inspection):
    assert "layers/mlp/up" in answer(inspection, "mlp")  # part of several names: a table
    assert "same piece on   1 device" in answer(inspection, "layers/mlp/up")
    norm = answer(inspection, "layers/mlp_norm/weight")
    assert "same piece on   8 devices (over fsdp, tensor)" in norm
    assert "final_norm/weight" in answer(inspection, "*norm/weight")
    axis = answer(inspection, "fsdp")
    assert "4 devices a group, numbers 2 apart" in axis and "1 3 5 7" in axis
    assert "heads -> tensor: 2 parts" in answer(inspection, "heads")
    device = answer(inspection, "5")
    assert device.startswith("device 5: fsdp 2, tensor 1")
    assert "rows 2:3 of the 4 of every microbatch" in device
    assert re.search(r"layers/attention/query +\[:, 32:48, 4:8, :\] +8,192", device)
    assert "numbered 0 to 7" in answer(inspection, "8")
    assert "did you mean fsdp" in answer(inspection, "fsp")
    for view in ("axes", "grid", "params", "state", "features", "help"):
        assert answer(inspection, view)


def test_prompt_ends_at_quit_and_at_the_end_of_the_input(inspection, capsys):
    lines = iter(["tensor", "quit", "fsdp"])
    prompt(inspection, lambda _: next(lines))
    assert "numbers 1 apart" in capsys.readouterr().out
    assert next(lines) == "fsdp"

    def end(_):
        raise EOFError

    prompt(inspection, end)


def test_page_is_self_contained_and_holds_the_data(inspection):
    text = page(inspection)
    assert not re.search(r"""(src|href)=|https?://|@import|url\(""", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert data["devices"] == 8
    assert [p["name"] for p in data["params"]] == [p.name for p in inspection.params]
    assert [entry["total"] for entry in data["state"]] == [e.total for e in inspection.state]


def test_page_survives_names_that_look_like_markup(inspection, monkeypatch):
    monkeypatch.setattr("jaxtron.mesh.page.features", lambda _: [("x", "</script><b>&")])
    text = page(inspection)
    assert text.count("</script>") == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert data["features"] == [["x", "</script><b>&"]]


def test_command_prints_for_any_number_of_devices(capsys):
    arguments = ["--config", "configs/tiny.yaml", "--devices", "64", "--print"]
    assert run(main, [*arguments, "parallel.tensor=8", "train.global_batch_size=64"]) == 0
    assert "64 devices" in capsys.readouterr().out


def test_command_writes_a_page(tmp_path, capsys):
    path = tmp_path / "mesh.html"
    assert run(main, ["--config", "configs/tiny.yaml", "--html", str(path)]) == 0
    assert path.read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out == f"wrote {path}\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--devices", "0"], "--devices is 0"),
        (["--devices", "3", "parallel.tensor=2"], "parallel"),
        (["--html", "no/such/folder/page.html"], "cannot write no/such/folder/page.html"),
        (["parallel.tensr=2"], "parallel.tensor"),
    ],
)
def test_command_refuses_with_a_message(arguments, message, capsys):
    assert run(main, ["--config", "configs/tiny.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.23 kB"),
        (77_600_000_000, "77.6 GB"),
        (855_900_000, "856 MB"),
        (999_960_000, "1.00 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_bytes_are_shown_in_decimal_units(count, text):
    assert bytes_text(count) == text
