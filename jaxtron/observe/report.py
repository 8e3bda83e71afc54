"""A run as one self-contained HTML page: curves, final numbers, resolved configuration.

A file ``report.json`` in the run folder may add to the page::

    {"title": "Quickstart",
     "reference_lines": [{"label": "unigram entropy", "value": 6.21}],
     "texts": [{"heading": "Generated text", "text": "def main(): ..."}]}

Reference lines [nats per token] are drawn in the loss plot, and the table says how far below each
the last evaluation (or, without one, the training loss) ends.
"""

import html
import math
from pathlib import Path
from string import Template
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, FiniteFloat, StringConstraints, ValidationError

from jaxtron.errors import DataError
from jaxtron.observe import plots
from jaxtron.observe.config import CONFIG_FILE
from jaxtron.observe.records import Record, read_records, write_atomically

NOTES_FILE = "report.json"

_PAGE = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
_Label = Annotated[str, StringConstraints(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reference(_Strict):
    """A level to compare the loss with [nats per token]."""

    label: _Label
    value: FiniteFloat


class Text(_Strict):
    """A piece of preformatted text under a heading."""

    heading: _Label
    text: str


class Notes(_Strict):
    """What report.json may hold."""

    title: str | None = None
    reference_lines: tuple[Reference, ...] = ()
    texts: tuple[Text, ...] = ()


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of the run in ``folder``.

    Args:
        folder: the run's ``observe.dir``.
        out: the file to write; None: report.html in ``folder``.

    Returns:
        The file written.

    Raises:
        DataError: there are no metrics, or they or report.json cannot be read, or ``out`` cannot
            be written.
    """
    page = report_page(folder)
    out = out or folder / "report.html"
    try:
        write_atomically(out, page)
    except OSError as error:
        raise DataError(
            f"cannot write the report {out}: {error.strerror}; give another --out"
        ) from error
    return out


def report_page(folder: Path) -> str:
    """The HTML page of the run in ``folder``; raises DataError as :func:`write_report` does."""
    train, evaluation = read_records(folder)
    if not train:
        raise DataError(f"{folder} holds no training step yet: nothing to report")
    notes = read_notes(folder)
    references = [plots.ReferenceLine(line.label, line.value) for line in notes.reference_lines]
    config = folder / CONFIG_FILE
    return _PAGE.substitute(
        title=html.escape(notes.title or folder.resolve().name),
        folder=html.escape(str(folder.resolve())),
        loss=plots.loss_plot(_series(train, "loss"), _evaluations(evaluation), references),
        learning_rate=plots.learning_rate_plot(_series(train, "lr")),
        gradient_norm=plots.gradient_norm_plot(_series(train, "grad_norm")),
        throughput=plots.throughput_plot(_series(train, "tokens_per_s_per_gpu")),
        step_time=plots.step_time_plot(_series(train, "step_time_s")),
        rows="\n".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in final_numbers(train, evaluation, notes)
        ),
        texts="\n".join(
            f"<h2>{html.escape(text.heading)}</h2><pre>{html.escape(text.text)}</pre>"
            for text in notes.texts
        ),
        config=html.escape(
            config.read_text(encoding="utf-8") if config.is_file() else f"no {CONFIG_FILE}"
        ),
    )


def read_notes(folder: Path) -> Notes:
    """The run's report.json; empty notes without one.

    Raises:
        DataError: the file is not JSON of the documented form.
    """
    path = folder / NOTES_FILE
    if not path.is_file():
        return Notes()
    try:
        return Notes.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}" for item in error.errors()
        )
        raise DataError(
            f"{path} is not a report description ({problems}); right is "
            '{"title": "...", "reference_lines": [{"label": "...", "value": 6.2}], '
            '"texts": [{"heading": "...", "text": "..."}]}, every key optional'
        ) from error


def final_numbers(
    train: list[Record], evaluation: list[Record], notes: Notes
) -> list[tuple[str, str]]:
    """Rows (name, value with unit) of the table of final numbers."""
    last = train[-1]
    loss = _value(last, "loss")
    rows = [
        ("Steps", f"{last['step']:,}"),
        ("Sequences consumed", f"{last['consumed_samples']:,}"),
        ("Tokens in the recorded steps", f"{sum(record['tokens'] for record in train):,}"),
        ("Training loss, last step", f"{loss:.4f} nats per token"),
    ]
    if evaluation:
        best = min(evaluation, key=lambda record: _value(record, "eval_loss", math.inf))
        loss = _value(evaluation[-1], "eval_loss")
        rows += [
            (
                "Evaluation loss, last",
                f"{loss:.4f} nats per token at step {evaluation[-1]['step']:,}",
            ),
            ("Evaluation perplexity, last", f"{np.exp(loss):,.2f}"),
            (
                "Evaluation loss, best",
                f"{_value(best, 'eval_loss'):.4f} nats per token at step {best['step']:,}",
            ),
        ]
        if "test_loss" in evaluation[-1]:
            test = _value(evaluation[-1], "test_loss")
            rows.append(("Test loss", f"{test:.4f} nats per token"))
    rows += [
        (
            f"Reference: {line.label}",
            f"{line.value:.4f} nats per token; the loss ends {_below(line.value - loss)}",
        )
        for line in notes.reference_lines
    ]
    seconds = _finite(train, "step_time_s")
    rows += [
        ("Time in training steps", _duration(sum(seconds))),
        ("Step time, median", f"{np.median(seconds):.4g} s"),
        ("Tokens/s per device, median", _median(train, "tokens_per_s_per_gpu", "{:,.0f}")),
        ("TFLOP/s per device, causal, median", _median(train, "tflops_per_gpu", "{:.4g}")),
        (
            "TFLOP/s per device, full attention, median",
            _median(train, "tflops_per_gpu_full_attention", "{:.4g}"),
        ),
        ("MFU (causal), median", _median(train, "mfu", "{:.1%}", "unknown peak of this device")),
        ("Device memory, peak", _peak(train, "memory_peak_bytes", "not counted by this device")),
        ("Host memory of the writing process, peak", _peak(train, "host_rss_bytes", "unknown")),
    ]
    broken = sum(not math.isfinite(_value(record, "loss")) for record in train)
    if broken:
        rows.append(("Steps whose loss is not a number", f"{broken:,}"))
    return rows


def _evaluations(records: list[Record]) -> dict[str, plots.Series]:
    """Curves by label: ``evaluation`` and, by name, each further validation set."""
    if not records:
        return {}
    names = {key for record in records for key in record if key.startswith("eval_loss/")}
    curves = {"evaluation": _series(records, "eval_loss")}
    return curves | {
        f"evaluation: {name.removeprefix('eval_loss/')}": _series(records, name)
        for name in sorted(names)
    }


def _series(records: list[Record], key: str) -> plots.Series:
    steps = np.array([record["step"] for record in records], dtype=np.int64)
    values = np.array([_value(record, key) for record in records], dtype=np.float64)
    return plots.Series(steps, np.where(np.isfinite(values), values, np.nan))


def _value(record: Record, key: str, otherwise: float = math.nan) -> float:
    value = record.get(key)
    return otherwise if value is None or math.isnan(value) else float(value)


def _finite(records: list[Record], key: str) -> list[float]:
    return [value for record in records if math.isfinite(value := _value(record, key))]


def _median(records: list[Record], key: str, form: str, absent: str = "unknown") -> str:
    values = _finite(records, key)
    return form.format(float(np.median(values))) if values else absent


def _peak(records: list[Record], key: str, absent: str) -> str:
    values = _finite(records, key)
    return f"{max(values) / 2**30:.2f} GiB" if values else absent


def _below(distance: float) -> str:
    return f"{abs(distance):.4f} {'below' if distance >= 0 else 'above'}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02.0f} s" if minutes else f"{rest:.1f} s"
