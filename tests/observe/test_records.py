"""metrics.jsonl after crashes, resumes and numbers that are none."""

import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.errors import DataError
from jaxtron.observe import records
from jaxtron.observe.records import MetricsFile, decode, encode, read_records, to_scalar


def write(folder, *lines, end="\n"):
    (folder / "metrics.jsonl").write_text("\n".join(lines) + end)


def steps(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def reject_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_numbers_that_json_lacks_are_null_with_their_name():
    line = encode({"step": 3, "loss": math.nan, "grad_norm": math.inf, "mfu": None, "lr": 0.5})
    assert json.loads(line, parse_constant=reject_constant) == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "mfu": None,
        "lr": 0.5,
        "nonfinite": {"loss": "nan", "grad_norm": "inf"},
    }


def test_nonfinite_numbers_come_back():
    record = decode(encode({"step": 1, "loss": math.nan, "a": math.inf, "b": -math.inf}))
    assert math.isnan(record["loss"])
    assert (record["a"], record["b"]) == (math.inf, -math.inf)
    assert "nonfinite" not in record


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (jnp.float32(0.25), 0.25),
        (jnp.int32(9), 9),
        (np.array(2.0), 2.0),
        (True, 1),
        (2**60 + 1, 2**60 + 1),
        (None, None),
    ],
)
def test_scalars_of_every_kind_become_python_numbers(value, expected):
    got = to_scalar("x", value)
    assert got == expected
    assert type(got) is type(expected) or isinstance(value, bool)


@pytest.mark.parametrize("value", [np.zeros(2), "3 tokens", [1.0, 2.0]])
def test_what_is_not_one_number_is_refused_by_name(value):
    with pytest.raises(TypeError, match="lr"):
        to_scalar("lr", value)


def test_resume_leaves_one_line_a_step_and_keeps_the_rest_aside(tmp_path):
    write(
        tmp_path,
        '{"step": 1, "loss": 5.0}',
        '{"step": 2, "loss": 4.0}',
        '{"step": 2, "eval_loss": 4.5}',
        '{"step": 3, "loss": 3.0}',
        '{"step": 4, "eval_loss": 3.5}',
        '{"step": 4, "lo',
        end="",
    )
    file = MetricsFile(tmp_path, start_step=2)
    file.write({"step": 3, "loss": 2.5})
    file.close()
    train, evaluation = read_records(tmp_path)
    assert [(r["step"], r["loss"]) for r in train] == [(1, 5.0), (2, 4.0), (3, 2.5)]
    assert [(r["step"], r["eval_loss"]) for r in evaluation] == [(2, 4.5)]
    assert file.discarded == 3
    assert (tmp_path / "metrics.discarded.jsonl").read_text().splitlines() == [
        '{"step": 3, "loss": 3.0}',
        '{"step": 4, "eval_loss": 3.5}',
        '{"step": 4, "lo',
    ]


def test_resume_at_the_last_line_changes_nothing(tmp_path):
    write(tmp_path, '{"step": 1, "loss": 5.0}', '{"step": 2, "loss": 4.0}')
    before = os.stat(tmp_path / "metrics.jsonl").st_ino
    MetricsFile(tmp_path, start_step=2).close()
    assert os.stat(tmp_path / "metrics.jsonl").st_ino == before
    assert not (tmp_path / "metrics.discarded.jsonl").exists()


def test_a_last_line_without_its_end_is_not_glued_to_the_next(tmp_path):
    write(tmp_path, '{"step": 1, "loss": 5.0}', '{"step": 2, "loss": 4.0}', end="")
    file = MetricsFile(tmp_path, start_step=2)
    file.write({"step": 3})
    file.close()
    assert steps(tmp_path) == [1, 2, 3]


def test_the_later_of_two_lines_of_a_step_counts(tmp_path):
    write(tmp_path, '{"step": 1, "loss": 5.0}', '{"step": 1, "loss": 4.0}')
    MetricsFile(tmp_path, start_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 4.0}\n'


def test_a_fresh_run_in_a_used_folder_sets_the_old_metrics_aside(tmp_path):
    write(tmp_path, '{"step": 1, "loss": 5.0}', '{"step": 2, "loss": 4.0}')
    MetricsFile(tmp_path, start_step=0).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert len((tmp_path / "metrics.discarded.jsonl").read_text().splitlines()) == 2


def test_a_crash_while_rewriting_keeps_the_old_file(tmp_path, monkeypatch):
    write(tmp_path, '{"step": 1, "loss": 5.0}', '{"step": 2, "loss": 4.0}')

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(records, "write_atomically", fail)
    with pytest.raises(OSError, match="disk full"):
        MetricsFile(tmp_path, start_step=1)
    assert steps(tmp_path) == [1, 2]


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    file = MetricsFile(tmp_path, start_step=0)
    file.write({"step": 1})
    assert steps(tmp_path) == [1]
    file.close()


def test_a_reader_skips_the_line_being_written_and_names_a_damaged_one(tmp_path):
    write(tmp_path, '{"step": 1, "loss": 5.0}', '{"step": 2, "l', end="")
    assert [record["step"] for record in read_records(tmp_path)[0]] == [1]
    write(tmp_path, '{"step": 1, "loss": 5.0}', "garbage", '{"step": 3, "loss": 5.0}')
    with pytest.raises(DataError, match="line 2"):
        read_records(tmp_path)


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        read_records(tmp_path)
