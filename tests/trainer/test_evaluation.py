"""The evaluation loss is a property of the data, not of the layout (O11)."""

import math

import numpy as np
import pytest

from tests.trainer.runs import (
    MESHES,
    SEQ,
    evaluations,
    make_config,
    make_trainer,
    saved_digests,
    steps,
    train,
)
from tests.trainer.sources import ragged

LAYOUTS = [
    ("1 device", 1),
    ("1 device", 4),
    ("data 8", 1),
    ("fsdp 8", 1),
    ("tensor 8", 2),
    ("data 2 x fsdp 2 x tensor 2", 2),
]


def ragged_config(folder, valid_rows, **sections):
    return make_config(
        folder,
        data={
            "source": "tests.trainer.sources:ragged",
            "source_options": {"valid_rows": valid_rows},
            "paths": [],
        },
        eval={"interval": 2, "iters": 10},
        **sections,
    )


class Recorder:
    """Takes the place of the logger."""

    def log_eval(self, step, metrics):
        self.metrics = metrics


def evaluate(trainer, state):
    recorder = Recorder()
    loss = trainer._evaluate(state, 0, recorder)
    assert recorder.metrics["eval_loss"] == loss
    return loss, recorder.metrics["eval_tokens"]


def expected(trainer, state, valid_rows):
    """From the logits of every row, in NumPy: (mean over valid tokens, their number)."""
    program = trainer.program
    rows = ragged(
        "valid", num_samples=0, seq_length=SEQ, vocab_size=64, seed=1234, valid_rows=valid_rows
    )
    total, count = 0.0, 0
    for row in (rows[i] for i in range(valid_rows)):
        tokens = np.broadcast_to(row["tokens"], (SEQ, SEQ)).copy()
        last = np.arange(SEQ, dtype=np.int32)
        logits = np.asarray(program.next_token_logits(state["params"], tokens, last), np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[last, row["labels"]]
        total += float(losses @ row["loss_mask"])
        count += int(row["loss_mask"].sum())
    return total / count, count


def test_every_layout_reports_the_mean_over_the_rows(tmp_path):
    """3 rows are less than a global batch of 8, 11 are more; the rest of a batch is padding."""
    results = {}
    for mesh, microbatches in LAYOUTS:
        for valid_rows in (3, 8, 11):
            trainer = make_trainer(
                ragged_config(
                    tmp_path,
                    valid_rows,
                    parallel=MESHES[mesh],
                    train={"num_microbatches": microbatches},
                )
            )
            state = trainer.program.init_state()
            if mesh == "1 device" and microbatches == 1:
                results[valid_rows] = expected(trainer, state, valid_rows)
            loss, tokens = evaluate(trainer, state)
            assert tokens == results[valid_rows][1] == sum(r % SEQ + 1 for r in range(valid_rows))
            assert math.isclose(loss, results[valid_rows][0], rel_tol=1e-6), (mesh, valid_rows)


def test_an_evaluation_between_two_steps_changes_nothing(tmp_path):
    without, with_ = tmp_path / "without", tmp_path / "with"
    train(without)
    result = train(with_, eval={"interval": 1, "iters": 1})
    assert len(evaluations(with_)) == 6
    assert result.eval_loss == evaluations(with_)[-1]["eval_loss"]
    for key in ("loss", "grad_norm", "lr", "consumed_samples"):
        assert [r[key] for r in steps(with_)] == [r[key] for r in steps(without)]
    assert saved_digests(with_, 6) == saved_digests(without, 6)


def test_evaluations_are_at_each_interval_and_at_the_end(tmp_path):
    train(tmp_path, train={"exit_interval": 3}, eval={"interval": 2, "iters": 1})
    assert [r["step"] for r in evaluations(tmp_path)] == [2, 3]
    train(tmp_path, train={"exit_interval": 5}, eval={"interval": 2, "iters": 1})
    assert [r["step"] for r in evaluations(tmp_path)] == [2, 3, 4, 5]
    assert all(r["eval_tokens"] == 8 * SEQ for r in evaluations(tmp_path))


@pytest.mark.parametrize("eval_section", [{"interval": 2, "iters": 0}, {"interval": 0, "iters": 2}])
def test_no_evaluation_needs_no_validation_split(tmp_path, eval_section):
    result = train(
        tmp_path,
        data={"split": "100,0,0"},
        train={"exit_interval": 2},
        eval=eval_section,
    )
    assert (result.step, result.eval_loss) == (2, None)
    assert evaluations(tmp_path) == []
