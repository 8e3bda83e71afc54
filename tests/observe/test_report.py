"""The report page of a run."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxtron.errors import DataError
from jaxtron.observe import plots
from jaxtron.observe.records import encode, read_records
from jaxtron.observe.report import Notes, final_numbers, read_notes, report_page, write_report


def record(step, loss):
    return {
        "step": step,
        "loss": loss,
        "grad_norm": 1.0 / step,
        "lr": 1e-3,
        "tokens": 1000,
        "consumed_samples": 8 * step,
        "step_time_s": 9.0 if step == 1 else 0.5,
        "tokens_per_s_per_gpu": 2000.0,
        "tflops_per_gpu": 40.0,
        "tflops_per_gpu_full_attention": 50.0,
        "mfu": None,
        "memory_peak_bytes": 3 * 2**30,
        "host_rss_bytes": 2**29,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    lines = [encode(record(step, 7.0 - step / 10)) for step in range(1, 21)]
    lines.insert(10, encode({"step": 10, "eval_loss": 5.5, "eval_tokens": 64}))
    lines.append(encode({"step": 20, "eval_loss": 5.0, "eval_tokens": 64}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text("model:\n  name: <b>&\n")
    notes = {
        "title": "First & last",
        "reference_lines": [{"label": "unigram entropy", "value": 6.25}],
        "texts": [{"heading": "Generated", "text": "if a < b:"}],
    }
    (folder / "report.json").write_text(json.dumps(notes))
    return folder


@pytest.fixture(scope="module")
def page(run):
    return report_page(run)


def test_every_validation_set_has_a_curve(tmp_path):
    lines = [encode(record(step, 7.0)) for step in (1, 2)]
    sets = {"eval_loss/code": 4.5, "eval_loss/law": 6.5}
    for step in (1, 2):
        lines.append(encode({"step": step, "eval_loss": 5.5, "eval_tokens": 64, **sets}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = report_page(tmp_path)
    for label in ("evaluation", "evaluation: code", "evaluation: law"):
        assert f">{label}</text>" in page


class Balance(HTMLParser):
    """Checks that tags close in order."""

    void = frozenset({"meta", "br", "link", "img"})

    def __init__(self):
        super().__init__()
        self.open = []
        self.links = []

    def handle_starttag(self, tag, attributes):
        self.links += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") and not value.startswith("#")
        ]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_other_file(page):
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.links == []
    assert page.count("<svg") == 5
    assert "@import" not in page


def test_the_config_is_shown_as_text(page):
    assert "name: &lt;b&gt;&amp;" in page


def test_final_numbers_are_those_of_the_metrics(run):
    train, evaluation = read_records(run)
    notes = read_notes(run)
    rows = dict(final_numbers(train, evaluation, notes))
    assert rows["Steps"] == "20"
    assert rows["Sequences consumed"] == "160"
    assert rows["Tokens in the recorded steps"] == "20,000"
    assert rows["Training loss, last step"] == "5.0000 nats per token"
    assert rows["Evaluation loss, last"] == "5.0000 nats per token at step 20"
    assert rows["Evaluation perplexity, last"] == "148.41"
    assert rows["Reference: unigram entropy"] == "6.2500 nats per token; the loss ends 1.2500 below"
    assert rows["Time in training steps"] == "18.5 s"
    assert rows["Step time, median"] == "0.5 s"
    assert rows["Tokens/s per device, median"] == "2,000"
    assert rows["MFU (causal), median"] == "unknown peak of this device"
    assert rows["Device memory, peak"] == "3.00 GiB"


def test_reference_lines_and_texts_reach_the_page(page):
    assert "<h1>First &amp; last</h1>" in page
    assert "unigram entropy: 6.250" in page
    assert "<pre>if a &lt; b:</pre>" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "file"),
        ('{"reference_line": []}', "reference_line"),
        ('{"reference_lines": [{"label": "x", "value": "high"}]}', r"reference_lines\.0\.value"),
    ],
)
def test_a_broken_description_is_refused_with_the_place(tmp_path, text, message):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_notes(tmp_path)


def test_a_run_without_evaluation_or_config_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(encode(record(1, 5.0)) + "\n")
    assert write_report(tmp_path) == tmp_path / "report.html"
    assert "no config.yaml" in (tmp_path / "report.html").read_text()


def test_lost_losses_are_counted_and_marked(tmp_path):
    losses = [5.0, math.nan, math.inf, 4.0]
    lines = [encode(record(step, loss)) for step, loss in enumerate(losses, start=1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    train, evaluation = read_records(tmp_path)
    rows = dict(final_numbers(train, evaluation, Notes()))
    assert rows["Steps whose loss is not a number"] == "2"
    assert "loss is not a number" in report_page(tmp_path)


def test_a_run_with_nothing_but_lost_losses_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(encode(record(1, math.nan)) + "\n")
    assert "nan nats per token" in report_page(tmp_path)


def test_an_empty_run_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no training step"):
        report_page(tmp_path)


def test_an_output_that_cannot_be_written_is_refused(run, monkeypatch):
    monkeypatch.setattr("jaxtron.observe.report.report_page", lambda folder: "")
    with pytest.raises(DataError, match="--out"):
        write_report(run, run / "absent" / "page.html")


def test_a_long_run_stays_small_and_shows_its_spike():
    steps = np.arange(1, 100_001)
    values = np.full(len(steps), 2.0)
    values[50_000] = 9.0
    svg = plots.loss_plot(plots.Series(steps, values), {})
    assert len(svg) < 400_000
    ticks = [float(text) for text in re.findall(r">(\d+(?:\.\d+)?)</text>", svg)]
    assert 9.0 in ticks or 8.0 in ticks


@pytest.mark.parametrize(("top", "logarithmic"), [(5.0, False), (50.0, True)])
def test_the_axis_is_logarithmic_where_values_span_more_than_ten(top, logarithmic):
    svg = plots.gradient_norm_plot(plots.Series(np.arange(1, 51), np.geomspace(1.0, top, 50)))
    ticks = [float(text) for text in re.findall(r">(\d+(?:\.\d+)?)</text>", svg)]
    assert ({1.0, 10.0} <= set(ticks) and 3.0 not in ticks) == logarithmic


def test_labels_are_text_whatever_they_hold():
    series = plots.Series(np.arange(1, 4), np.array([3.0, 2.0, 1.0]))
    svg = plots.loss_plot(series, {"evaluation": series}, [plots.ReferenceLine("a $_ <b>", 2.0)])
    assert "a $_ &lt;b&gt;: 2.000" in svg
