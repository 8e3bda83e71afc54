"""Several benchmarks from one file."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxtron.bench.__main__ import main
from jaxtron.bench.matrix import Outcome, command, read_matrix, settings_of, table
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
    lines = (tmp_path / "matrix.jsonl").read_text().splitlines()
    good, wrong = map(json.loads, lines)
    assert good["name"] == "good" and good["step_time_s"] > 0
    assert good["settings"]["environment"] == {"JAXTRON_TEST": "1"}
    assert good["settings"]["overrides"][-1] == "runtime.cpu_devices=1"
    assert wrong["name"] == "wrong" and wrong["error"].startswith("error: parallel: tensor 3")
    rows = (tmp_path / "matrix.md").read_text().splitlines()
    plot = (tmp_path / "matrix.svg").read_text()
    assert ">good</text>" in plot and ">wrong</text>" not in plot
    assert rows[2].startswith("| good | 1 device |") and rows[3].startswith("| wrong | failed")
    with pytest.raises(ConfigError, match="matrix.jsonl exists"):
        main(["matrix", str(file)])


def test_resume_runs_what_has_no_result_with_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, SMALL)
    results = tmp_path / "matrix.jsonl"
    assert main(["matrix", str(file), "runtime.cpu_devices=1"]) == 1
    first = json.loads(results.read_text().splitlines()[0])
    file.write_text(SMALL.replace("[parallel.tensor=3]", "[model.num_layers=2]"))
    assert main(["matrix", str(file), "--resume", "runtime.cpu_devices=1"]) == 0
    assert "good                             has a result" in capsys.readouterr().out
    assert [json.loads(line)["name"] for line in results.read_text().splitlines()] == [
        *("good", "wrong"),
        "wrong",
    ]
    rows = (tmp_path / "matrix.md").read_text().splitlines()
    assert f"| {1e3 * first['step_time_s']:.1f} |" in rows[2]
    assert rows[3].startswith("| wrong | 1 device |")
    # other settings of all cases: none has a result of those
    assert main(["matrix", str(file), "--resume", "--timeout", "1"]) == 1
    assert len(results.read_text().splitlines()) == 5
    results.write_text('{"name": "step"}\n')
    with pytest.raises(ConfigError, match=r"matrix.jsonl:1 is not a result .*leave out --resume"):
        main(["matrix", str(file), "--resume"])
    results.unlink()  # the table that is left may be of something else
    with pytest.raises(ConfigError, match=r"matrix\.md exists"):
        main(["matrix", str(file), "--resume"])


WRITES_NOTHING = """
config: tiny
steps: 1
overrides: [model.num_layers=1]
cases:
  - {name: nothing, overrides: [--help]}
  - {name: second, environment: {XLA_FLAGS: --no_such_flag}}
"""


def test_a_case_without_a_result_and_one_with_its_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["matrix", str(write(tmp_path, WRITES_NOTHING))]) == 1
    nothing, second = (tmp_path / "matrix.md").read_text().splitlines()[2:4]
    assert nothing.startswith("| nothing | failed: it ended without a result")
    assert second.startswith("| second | failed") and "no_such_flag" in second
    assert "matrix.svg" not in capsys.readouterr().out  # nothing to draw


def test_a_case_that_takes_too_long(tmp_path: Path) -> None:
    assert main(["matrix", str(write(tmp_path, SMALL)), "--timeout", "1"]) == 1
    rows = (tmp_path / "matrix.md").read_text().splitlines()
    assert rows[2].startswith("| good | failed: took more than 1 s")
    for seconds in ("0", "nan"):
        with pytest.raises(SystemExit):
            main(["matrix", str(tmp_path / "matrix.yaml"), "--timeout", seconds])


def test_sigterm_ends_the_case_too_and_keeps_what_ran(tmp_path: Path) -> None:
    """The second case would run for hours."""
    text = SMALL.replace("name: wrong, overrides: [parallel.tensor=3]", "name: long")
    file = write(tmp_path, text.replace("steps: 1\n", "steps: 1000000\n", 1))
    # the first case is short: what ran before is in the table
    file.write_text(file.read_text().replace("name: good,", "name: good, overrides: [x=1],"))
    script = "import sys; from jaxtron.bench.__main__ import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "matrix", str(file), "runtime.cpu_devices=1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "failed" in process.stdout.readline()  # then the second case begins
    [child] = _children(process.pid)
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    rows = (tmp_path / "matrix.md").read_text().splitlines()
    assert rows[3] == "| long | failed: interrupted before its end | | | | | | |"
    assert not Path(f"/proc/{child}").exists()


def _children(pid: int) -> list[int]:
    """Processes that ``pid`` has started, once there are any."""
    for _ in range(200):
        found = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _parent(p) == pid]
        if found:
            return found
        time.sleep(0.05)
    return []


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None


def test_settings_of_all_come_before_those_of_a_case(tmp_path: Path) -> None:
    matrix = read_matrix(write(tmp_path, SMALL))
    words = command("wrong", settings_of(matrix, matrix.cases[1], ["a.b=1"]), Path("out"))
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
        (
            "cases: [{name: a, environment: {X: 0}}]",
            r"matrix.yaml: cases.0.environment.X is 0: Input should be a valid string$",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_matrix(write(tmp_path, text))


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_bytes(b"cases: [{name: \xff}]")
    with pytest.raises(ConfigError, match=r"matrix.yaml is not UTF-8 \(invalid start byte"):
        read_matrix(file)


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
