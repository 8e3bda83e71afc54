"""Several benchmarks from one file, each in a process of its own, and a table of them.

The file is YAML::

    config: llama3_8b                    # for all cases; a case may name its own
    steps: 4                             # timed steps of each case (default 5)
    warmup: 1                            # steps before them (default 2)
    overrides: [model.num_layers=8]      # before each case's own
    cases:
      - {name: 1 GPU, environment: {CUDA_VISIBLE_DEVICES: "0"}, overrides: [parallel.fsdp=1]}
      - {name: fsdp 4, overrides: [parallel.fsdp=4]}

The first case is what the others are compared with. Every case adds a line of JSON to the results:
its settings, and what was measured or the error. ``--resume`` takes from them the cases that have a
result with the same settings, and runs the others. A configuration is known by its name: what
changed within that file is not seen.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from jaxtron.config.yaml_io import parse_yaml
from jaxtron.errors import ConfigError
from jaxtron.nearest import nearest


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Case(_Part):
    """One benchmark.

    Attributes:
        name: in the table.
        config: file or preset; None: the matrix's.
        overrides: ``section.key=value``.
        environment: variables of its process, over those of this one.
    """

    name: Annotated[str, Field(min_length=1)]
    config: str | None = None
    overrides: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class Matrix(_Part):
    """What a file describes; see the module."""

    config: str | None = None
    steps: Annotated[int, Field(ge=1)] = 5
    warmup: Annotated[int, Field(ge=0)] = 2
    overrides: tuple[str, ...] = ()
    cases: Annotated[tuple[Case, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Outcome:
    """A case that ran: what :class:`jaxtron.bench.step.StepTiming` says of it, or why it failed."""

    name: str
    timing: Mapping[str, Any] | None
    error: str = ""

    def line(self, settings: Mapping[str, Any]) -> str:
        """A line of the results."""
        found = {"error": self.error} if self.timing is None else self.timing
        return json.dumps({"name": self.name, "settings": settings, **found}) + "\n"


def read_matrix(path: Path) -> Matrix:
    """Read a file.

    Raises:
        ConfigError: it is missing, no YAML, or says something unknown, with the place.
    """
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"), str(path))
        matrix = Matrix.model_validate(raw)
    except OSError as error:
        raise ConfigError(f"cannot read the benchmark matrix {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason} at byte {error.start})") from None
    except ValidationError as error:
        found = error.errors()
        inner = [e for e in found if not any(_within(other, e) for other in found)]
        raise ConfigError(f"{path}: " + "; ".join(map(_problem, inner))) from error
    names = [case.name for case in matrix.cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{path}: several cases are named {', '.join(twice)}: give each its own")
    return matrix


def _within(inner: ErrorDetails, outer: ErrorDetails) -> bool:
    """Whether one error's place lies inside of another's, which then follows from it."""
    size = len(outer["loc"])
    return len(inner["loc"]) > size and inner["loc"][:size] == outer["loc"]


def _problem(error: ErrorDetails) -> str:
    """What pydantic found, with the place and the value."""
    place = ".".join(map(str, error["loc"]))
    part = Case if len(error["loc"]) > 1 else Matrix
    if error["type"] == "extra_forbidden":
        return f"{place} is not a key: {nearest(str(error['loc'][-1]), part.model_fields)}"
    if error["type"] == "missing":
        return f"{place} is missing"
    if not place:
        return f"expected a mapping with {', '.join(Matrix.model_fields)}, found {error['input']!r}"
    return f"{place} is {error['input']!r}: {error['msg']}"


def settings_of(matrix: Matrix, case: Case, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a case is run with; ``overrides`` come after its own."""
    return {
        "config": case.config or matrix.config,
        "steps": matrix.steps,
        "warmup": matrix.warmup,
        "overrides": [*matrix.overrides, *case.overrides, *overrides],
        "environment": case.environment,
    }


def command(name: str, settings: Mapping[str, Any], json_file: Path) -> list[str]:
    """The process of a case."""
    config = settings["config"]
    return [
        *(sys.executable, "-m", "jaxtron.bench", "step"),
        *(() if config is None else ("--config", config)),
        *("--name", name, "--json", str(json_file)),
        *("--steps", str(settings["steps"]), "--warmup", str(settings["warmup"])),
        *settings["overrides"],
    ]


def read_results(json_file: Path) -> dict[str, dict[str, Any]]:
    """The newest line of every case in a file of results.

    Raises:
        ConfigError: a line is not of a matrix.
    """
    results: dict[str, dict[str, Any]] = {}
    text = json_file.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            found = None
        if not isinstance(found, dict) or not {"name", "settings"} <= found.keys():
            raise ConfigError(
                f"{json_file}:{number} is not a result of a benchmark matrix (a JSON object with "
                "name and settings): remove the line, or leave out --resume"
            )
        results[found["name"]] = found
    return results


def run_matrix(
    matrix: Matrix,
    json_file: Path,
    *,
    timeout_s: float,
    report: Callable[[str], None],
    overrides: Sequence[str] = (),
) -> Iterator[Outcome]:
    """Run the cases one after the other; one that fails does not stop the others.

    What ends this process while a case runs, as an exception, ends the case too.

    Args:
        matrix: the cases.
        json_file: gets a line for every case that ran. Cases that it has a result of, with the
            same settings, are not run again.
        timeout_s: seconds that a case may take.
        report: called with a line for people after each case.
        overrides: ``section.key=value`` for all cases.
    """
    before = read_results(json_file) if json_file.exists() else {}
    for case in matrix.cases:
        settings = settings_of(matrix, case, overrides)
        old = before.get(case.name, {})
        if "error" not in old and old.get("settings") == settings:
            report(f"{case.name:32s} has a result")
            yield Outcome(case.name, old)
            continue
        outcome, line = _run_case(case.name, settings, timeout_s)
        with json_file.open("a", encoding="utf-8") as file:
            file.write(outcome.line(settings))
        report(line)
        yield outcome


def _run_case(name: str, settings: Mapping[str, Any], timeout_s: float) -> tuple[Outcome, str]:
    """What a case's process measured, and a line for people."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.jsonl"
        try:
            done = subprocess.run(
                command(name, settings, result),
                env={**os.environ, **settings["environment"]},
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
            error = _last_line(done.stderr) if done.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"took more than {timeout_s:g} s"
        if not error and not result.exists():
            error = "it ended without a result"
        if error:
            return Outcome(name, None, error), f"{name:32s} failed: {error}"
        return Outcome(name, json.loads(result.read_text())), done.stdout.strip().partition("\n")[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["no message"])[-1]


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes in Markdown, with devices and versions below."""
    timings = [outcome.timing for outcome in outcomes if outcome.timing is not None]
    base = outcomes[0].timing
    rows = [
        "| case | layout | ms | tokens/s/GPU | TFLOP/s/GPU | MFU | of the first | peak GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        timing = outcome.timing
        if timing is None:
            rows.append(f"| {outcome.name} | failed: {outcome.error} | | | | | | |")
            continue
        layout = ", ".join(
            f"{key} {value}"
            for key, value in timing["layout"].items()
            if key in ("pipeline", "data", "fsdp", "expert", "context", "tensor")
        )
        ratio = "" if base is None else f"{timing['tflops_per_gpu'] / base['tflops_per_gpu']:.3f}"
        mfu = "" if timing["mfu"] is None else f"{100 * timing['mfu']:.1f} %"
        peak = timing["memory_peak_bytes"]
        rows.append(
            f"| {outcome.name} | {layout or '1 device'} "
            f"| {1e3 * timing['step_time_s']:.1f} | {timing['tokens_per_s_per_gpu']:.0f} "
            f"| {timing['tflops_per_gpu']:.1f} | {mfu} | {ratio} "
            f"| {'' if peak is None else f'{peak / 2**30:.1f}'} |"
        )
    if timings:
        devices = sorted({str(timing["device"]) for timing in timings})
        versions = [
            ", ".join(f"{name} {v}" for name, v in timing["versions"].items()) for timing in timings
        ]
        rows += ["", "; ".join([*devices, *dict.fromkeys(versions)])]
    return "\n".join(rows) + "\n"
