"""metrics.jsonl: one JSON object a line, one line a step, also after crashes and resumes.

A training line carries ``step`` and the step's scalars, an evaluation line ``step``, ``eval_loss``,
``eval_tokens`` and, for each set of ``data.valid_sets``, ``eval_loss/name`` and
``eval_tokens/name``; that of the run's end also ``test_loss`` and ``test_tokens``. Numbers that
JSON has no form for are written as null, and the key ``nonfinite`` of that line says what they
were: ``{"loss": null, "nonfinite": {"loss": "nan"}}``. A null without an entry there means that the
figure does not exist (``mfu`` on a CPU).

Every line is handed to the operating system when it is written, so a killed process loses nothing
and leaves at most one torn last line. A run that resumes at step ``n`` trains the steps after ``n``
again. Opening the file for it therefore keeps the lines up to ``n`` (the last one where a step
stands twice) and moves all others, torn and unreadable ones too, to ``metrics.discarded.jsonl``:
the file then holds one line a step, and nothing that was measured is lost. The new file replaces
the old one in one rename, after the discarded lines are on disk.
"""

import json
import math
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtron.errors import DataError

METRICS_FILE = "metrics.jsonl"
DISCARDED_FILE = "metrics.discarded.jsonl"

Scalar = int | float | None
Record = dict[str, Any]


def to_scalar(key: str, value: Any) -> Scalar:
    """A host number from a Python, NumPy or JAX scalar; booleans become 0 or 1.

    Raises:
        TypeError: ``value`` is not one number.
    """
    if value is None:
        return None
    try:
        return operator.index(value)
    except TypeError:
        pass
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {key!r} is not one number: {value!r}") from error


def encode(record: Mapping[str, Scalar]) -> str:
    """``record`` as a line of valid JSON, without the line's end."""
    line: Record = {}
    nonfinite: dict[str, str] = {}
    for key, value in record.items():
        if value is not None and not math.isfinite(value):
            nonfinite[key] = str(value)
            value = None
        line[key] = value
    if nonfinite:
        line["nonfinite"] = nonfinite
    return json.dumps(line, allow_nan=False)


def decode(line: str) -> Record | None:
    """The record of a line, its non-finite numbers restored; None if it is torn or foreign."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or not isinstance(record["step"], int):
            return None
        record.update({key: float(text) for key, text in record.pop("nonfinite", {}).items()})
    except (ValueError, KeyError, AttributeError):
        return None
    return record


def is_evaluation(record: Record) -> bool:
    """Whether a record is an evaluation's and not a training step's."""
    return "eval_loss" in record


def read_records(folder: Path) -> tuple[list[Record], list[Record]]:
    """Training and evaluation records of a run folder, by step.

    A torn last line, of a run that is writing or was killed, is left out.

    Raises:
        DataError: there is no metrics file, or a line before the last is not a record.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{path} does not exist: give the folder of a run (its observe.dir)")
    lines = list(_lines(path))
    train: dict[int, Record] = {}
    evaluation: dict[int, Record] = {}
    for number, line in enumerate(lines, start=1):
        record = decode(line)
        if record is None:
            if number == len(lines):
                break
            raise DataError(
                f"{path}, line {number} is not a metrics record (a JSON object with a step): "
                f"{line[:80]!r}; resume the run or remove the line"
            )
        (evaluation if is_evaluation(record) else train)[record["step"]] = record
    return [train[step] for step in sorted(train)], [evaluation[s] for s in sorted(evaluation)]


class MetricsFile:
    """Appends records to ``folder``/metrics.jsonl.

    Attributes:
        discarded: lines that were moved away when the file was opened.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        """Open the file for a run whose last finished step is ``start_step``."""
        path = folder / METRICS_FILE
        self.discarded = _keep_up_to(path, start_step) if path.exists() else 0
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Mapping[str, Scalar]) -> None:
        """Append one record and hand it to the operating system."""
        self._file.write(encode(record) + "\n")

    def close(self) -> None:
        """Put everything on disk and close the file."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def write_atomically(path: Path, text: str) -> None:
    """Replace the file ``path`` by ``text`` in one rename; readers see the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.strip():
                yield line.rstrip("\n")


def _keep_up_to(path: Path, step: int) -> int:
    """Leave one readable line per step up to ``step``; returns how many lines were moved away."""
    kept: dict[tuple[bool, int], str] = {}
    discarded: list[str] = []
    for line in _lines(path):
        record = decode(line)
        if record is None or record["step"] > step:
            discarded.append(line)
            continue
        identity = (is_evaluation(record), record["step"])
        if identity in kept:
            discarded.append(kept.pop(identity))
        kept[identity] = line
    text = "".join(f"{line}\n" for line in kept.values())
    if discarded:
        with path.with_name(DISCARDED_FILE).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in discarded)
            file.flush()
            os.fsync(file.fileno())
    if discarded or path.stat().st_size != len(text.encode()):
        write_atomically(path, text)
    return len(discarded)
