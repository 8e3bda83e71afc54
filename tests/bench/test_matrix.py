"""Several benchmarks from one file."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxtron.bench.__main__ import main
from jaxtron.bench.matrix import Outcome, command, read_matrix, table
from jaxtron.config.load import load_config
from jaxtron.errors import ConfigError

SMALL = """
config: tiny
steps: 1
warmup: 0
overrides: [model.num_layers=1, data.seq_length=32, train.global_batch_size=2]
cases:
  - {name: good, environment: {JAXTRON_TEST: "1"}}
  - {name: wrong, overrides: [parallel.tensor=3]}
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "matrix.yaml"
    file.write_text(text)
    return file


def test_a_case_that_fails_is_named_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, SMALL)
    assert main(["matrix", str(file), "runtime.cpu_devices=1"]) == 1
    out = capsys.readouterr().out
    assert "wrong" in out and "failed: error: parallel: tensor 3" in out
    [line] = (tmp_path / "matrix.jsonl").read_text().splitlines()
    assert json.loads(line)["name"] == "good"
    rows = (tmp_path / "matrix.md").read_text().splitlines()
    plot = (tmp_path / "matrix.svg").read_text()
    assert ">good</text>" in plot and ">wrong</text>" not in plot
    assert rows[2].startswith("| good | 1 device |") and rows[3].startswith("| wrong | failed")
    with pytest.raises(ConfigError, match="matrix.jsonl exists"):
        main(["matrix", str(file)])


def test_settings_of_all_come_before_those_of_a_case(tmp_path: Path) -> None:
    matrix = read_matrix(write(tmp_path, SMALL))
    words = command(matrix, matrix.cases[1], Path("out"), ["a.b=1"])
    assert words[-3:] == ["train.global_batch_size=2", "parallel.tensor=3", "a.b=1"]
    assert words[words.index("--config") + 1] == "tiny"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cases: []", r"cases is \[\]: .*at least 1"),
        ("cases: [{name: a, override: []}]", "cases.0.override is not a key: .*mean overrides"),
        ("{step: 1, cases: [{name: a}]}", "step is not a key: did you mean steps"),
        ("cases: [{}]", "cases.0.name is missing"),
        ("{steps: 0, cases: [{name: a}]}", "steps is 0: .*greater than or equal to 1"),
        ("[1, 2]", r"expected a mapping with config, .*, cases, found \[1, 2\]"),
        ("cases: [{name: a}, {name: a}]", "several cases are named a"),
        ("cases: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_matrix(write(tmp_path, text))


def test_the_table_compares_with_the_first_case() -> None:
    def outcome(name: str, tflops: float, **layout: int) -> Outcome:
        timing: dict[str, Any] = {
            "layout": {**layout, "data_sharding": "optim"},
            "step_time_s": 0.5,
            "tokens_per_s_per_gpu": 1000.4,
            "tflops_per_gpu": tflops,
            "mfu": 0.5,
            "memory_peak_bytes": 3 * 2**29,
            "device": "4 x GPU",
            "versions": {"jax": "1.2"},
        }
        return Outcome(name, timing)

    text = table([outcome("one", 400.0), outcome("four", 300.0, fsdp=2, tensor=2)])
    assert "| four | fsdp 2, tensor 2 | 500.0 | 1000 | 300.0 | 50.0 % | 0.750 | 1.5 |" in text
    assert text.endswith("4 x GPU; jax 1.2\n")


def test_the_matrices_that_come_along_are_valid() -> None:
    for file in Path("configs/bench").glob("*.yaml"):
        matrix = read_matrix(file)
        for case in matrix.cases:
            load_config(case.config or matrix.config, [*matrix.overrides, *case.overrides])
