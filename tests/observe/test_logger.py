"""What a run leaves behind and what a person sees of it."""

import io
import json
import math
import os
import re
import subprocess
import sys

import pytest
import yaml
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxtron.errors import ConfigError
from jaxtron.observe.config import ObserveConfig
from jaxtron.observe.flops import FlopsPerToken
from jaxtron.observe.logger import RunLogger
from jaxtron.observe.throughput import Throughput

THROUGHPUT = Throughput(FlopsPerToken(2e9, 3e9), devices=2, peak_tflops=100.0)


def metrics(step, /, **changes):
    values = {
        "step": step,
        "loss": 4.0,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "tokens": 8000,
        "consumed_samples": 16 * step,
        "global_batch_size": 16,
        "step_time_s": 0.5,
    }
    return values | changes


def logger(folder, **changes):
    start_step = changes.pop("start_step", 0)
    primary = changes.pop("primary", True)
    config = ObserveConfig(**({"dir": folder and str(folder), "tensorboard": False} | changes))
    return RunLogger(
        config,
        total_steps=10,
        primary=primary,
        throughput=THROUGHPUT,
        start_step=start_step,
        memory=lambda: {"memory_peak_bytes": None, "host_rss_bytes": 5},
    )


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_line_carries_every_documented_key(tmp_path):
    with logger(tmp_path) as log:
        log.log_step(metrics(1))
    assert lines(tmp_path) == [
        metrics(1)
        | {
            "tokens_per_s_per_gpu": 8000.0,
            "tflops_per_gpu": 16.0,
            "tflops_per_gpu_full_attention": 24.0,
            "mfu": 0.16,
            "memory_peak_bytes": None,
            "host_rss_bytes": 5,
        }
    ]


def test_an_evaluation_has_its_own_line(tmp_path, capsys):
    with logger(tmp_path) as log:
        log.log_step(metrics(1))
        log.log_eval(1, {"eval_loss": 2.0, "eval_tokens": 640})
    assert lines(tmp_path)[1] == {"step": 1, "eval_loss": 2.0, "eval_tokens": 640}
    printed = capsys.readouterr().out
    assert "validation loss at iteration 1 | lm loss value: 2.000000E+00" in printed
    assert "lm loss PPL: 7.389056E+00" in printed


def test_an_evaluation_of_named_sets_shows_the_loss_of_each(tmp_path, capsys):
    record = {"eval_loss": 2.0, "eval_tokens": 640, "eval_loss/code": 1.5, "eval_tokens/code": 64}
    with logger(tmp_path) as log:
        log.log_eval(1, record)
    assert lines(tmp_path) == [{"step": 1, **record}]
    assert "| evaluated tokens: 640 | code: 1.500000E+00 |" in capsys.readouterr().out


def test_the_log_line_has_megatrons_fields_over_the_interval(tmp_path, capsys):
    with logger(tmp_path, log_interval=2) as log:
        log.log_step(metrics(1, loss=3.0, step_time_s=0.25))
        log.log_step(metrics(2, loss=5.0, loss_scale=1024.0, num_zeros=7, params_norm=12.5))
        log.log_step(metrics(3))
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1
    line = re.sub(r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", "", out[0])
    assert line == (
        "iteration        2/      10 | consumed samples:           32 | "
        "elapsed time per iteration (ms): 375.0 | throughput per GPU (TFLOP/s/GPU): 21.3 | "
        "learning rate: 3.000000E-04 | global batch size:    16 | lm loss: 4.000000E+00 | "
        "loss scale: 1024.0 | grad norm: 1.250 | num zeros: 7 | params norm: 12.500 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | "
        "tokens per second per GPU: 10666.7 | MFU: 21.3% |"
    )


def test_the_last_step_has_a_log_line_whatever_the_interval(tmp_path, capsys):
    with logger(tmp_path, log_interval=4, start_step=8) as log:
        log.log_step(metrics(9))
        log.log_step(metrics(10))
    assert re.search(r"iteration +10/ +10 ", capsys.readouterr().out)


def test_nan_losses_and_skipped_steps_are_counted_apart_from_the_mean(tmp_path, capsys):
    with logger(tmp_path, log_interval=3) as log:
        log.log_step(metrics(1, loss=3.0))
        log.log_step(metrics(2, loss=math.nan, grad_norm=math.inf, skipped=True))
        log.log_step(metrics(3, loss=4.0))
    out = capsys.readouterr().out
    assert "lm loss: 3.500000E+00" in out
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in out
    assert lines(tmp_path)[1]["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}


def test_without_a_peak_mfu_is_null_and_not_printed(tmp_path, capsys):
    config = ObserveConfig(dir=str(tmp_path), tensorboard=False)
    throughput = Throughput(FlopsPerToken(2e9, 3e9), devices=2, peak_tflops=None)
    with RunLogger(config, total_steps=1, primary=True, throughput=throughput) as log:
        log.log_step(metrics(1))
    assert lines(tmp_path)[0]["mfu"] is None
    assert "MFU" not in capsys.readouterr().out


def test_only_the_primary_process_writes(tmp_path, capsys):
    folder = tmp_path / "run"
    with logger(folder, primary=False) as log:
        log.write_config({"a": 1})
        log.log_step(metrics(1))
        log.log_eval(1, {"eval_loss": 1.0})
        log.message("hello")
    assert not folder.exists()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_without_a_folder_lines_are_printed_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with logger(None, tensorboard=True) as log:
        log.write_config({"a": 1})
        log.log_step(metrics(1))
    assert "lm loss" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_has_one_line_a_step(tmp_path, capsys):
    with logger(tmp_path) as log:
        for step in range(1, 6):
            log.log_step(metrics(step))
    with logger(tmp_path, start_step=3) as log:
        for step in range(4, 7):
            log.log_step(metrics(step, loss=1.0))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines(tmp_path)] == [4.0] * 3 + [1.0] * 3
    assert "moved to metrics.discarded.jsonl: 2" in capsys.readouterr().out


def test_the_resolved_config_is_yaml_in_its_own_order(tmp_path):
    resolved = {"model": {"num_layers": 2, "name": "ÅB"}, "data": {"paths": ["x"], "dir": None}}
    with logger(tmp_path) as log:
        log.write_config({"old": 1})
        log.write_config(resolved)
    text = (tmp_path / "config.yaml").read_text()
    assert yaml.safe_load(text) == resolved
    assert text.index("model") < text.index("data")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 2}, "steps only go up"),
        ({"step_time_s": 0.0}, "step_time_s"),
        ({"step_time_s": math.nan}, "step_time_s"),
        ({"tokens": 1.5}, r"tokens is 1\.5: expected an integer"),
        ({"loss": None}, "lack loss"),
    ],
)
def test_impossible_metrics_are_refused(tmp_path, change, message):
    with logger(tmp_path) as log:
        log.log_step(metrics(2))
        with pytest.raises(ValueError, match=message):
            log.log_step(metrics(3, **change))
    assert len(lines(tmp_path)) == 1


def test_a_missing_metric_is_named(tmp_path):
    incomplete = metrics(1)
    del incomplete["lr"], incomplete["tokens"]
    with logger(tmp_path) as log, pytest.raises(ValueError, match="lack tokens, lr"):
        log.log_step(incomplete)


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"observe\.dir"):
        logger(tmp_path / "file" / "run")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_log_lines_stay_whole_beside_the_progress_bar(tmp_path, monkeypatch):
    """stdout and stderr are one terminal: each log line must stand alone on its line."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with logger(tmp_path, progress="auto") as log:
        for step in (1, 2, 3):
            log.log_step(metrics(step))
    shown = [line.split("\r")[-1] for line in terminal.getvalue().split("\n")]
    assert sum(bool(re.fullmatch(r" \[.{19}\] iteration .* \|", line)) for line in shown) == 3
    assert "3/10" in terminal.getvalue()
    assert "loss 4.0000, 8,000 tokens/s/GPU" in terminal.getvalue()


@pytest.mark.parametrize(("progress", "bars"), [("on", True), ("off", False), ("auto", False)])
def test_the_bar_is_shown_when_asked_for_or_on_a_terminal(tmp_path, capsys, progress, bars):
    with logger(tmp_path, progress=progress) as log:
        log.log_step(metrics(1))
    assert ("1/10" in capsys.readouterr().err) == bars


def events(folder):
    """Events of all files below ``folder``: length-prefixed records (TFRecord) of protobufs."""
    found = []
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[12 + size + 4 :]
    return found


def test_tensorboard_has_the_same_scalars(tmp_path):
    with logger(tmp_path, tensorboard=True) as log:
        log.log_step(metrics(1, loss=math.nan))
        log.log_step(metrics(2, loss=2.5))
        log.log_eval(2, {"eval_loss": 2.0, "eval_tokens": 640})
    scalars = {
        (event.step, value.tag): value.simple_value
        for event in events(tmp_path / "tensorboard")
        for value in event.summary.value
    }
    for line in lines(tmp_path):
        for key, value in line.items():
            if key not in ("step", "nonfinite") and value is not None:
                assert scalars[line["step"], key] == pytest.approx(value, rel=1e-6)
    assert math.isnan(scalars[1, "loss"])
    assert (1, "memory_peak_bytes") not in scalars


def test_tensorboard_hides_the_steps_that_are_trained_again(tmp_path):
    with logger(tmp_path, tensorboard=True, start_step=3) as log:
        log.log_step(metrics(4))
    starts = [
        event.step
        for event in events(tmp_path / "tensorboard")
        if event.session_log.status == SessionLog.START
    ]
    assert starts == [4]


def test_the_bar_shows_on_a_terminal_that_reports_no_size(tmp_path):
    """As under `script` or `docker -t`: 0 rows, 0 columns."""
    reader, terminal = os.openpty()
    program = (
        "from jaxtron.observe.console import Console\n"
        "console = Console('auto', total_steps=3, start_step=0)\n"
        "console.advance({'step': 3, 'loss': 1.0, 'tokens_per_s_per_gpu': 5.0})\n"
        "console.close()\n"
    )
    with os.fdopen(terminal, "wb"):
        subprocess.run(
            [sys.executable, "-c", program],
            stdout=terminal,
            stderr=terminal,
            check=True,
            timeout=60,
        )
        shown = os.read(reader, 4096).decode()
    os.close(reader)
    assert "3/3" in shown
