"""The evaluation loss is a property of the data, not of the layout (O11)."""

import math

import jax
import numpy as np
import pytest

from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.errors import ConfigError
from tests.trainer.runs import (
    MESHES,
    SEQ,
    evaluations,
    make_config,
    make_trainer,
    saved_digests,
    steps,
    train,
    write_corpus,
)
from tests.trainer.sources import ragged

EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
LAYOUTS: list[tuple[dict, int, dict]] = [
    ({}, 1, {}),
    ({}, 4, {}),
    ({"data": 8}, 1, {}),
    ({"data": 4}, 2, {}),
    ({"fsdp": 8}, 1, {}),
    ({"tensor": 8}, 2, {}),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 2, {}),
    ({"context": 4, "context_strategy": "ring"}, 1, {}),
    ({"fsdp": 2, "context": 2, "context_strategy": "all_to_all"}, 2, {}),
    ({"pipeline": 2}, 4, {}),
    ({"pipeline": 2, "tensor": 2, "context": 2}, 2, {}),
    ({}, 1, EXPERTS),
    ({"expert": 4, "data": 2}, 1, EXPERTS),
    ({"expert": 2, "pipeline": 2, "tensor": 2}, 2, EXPERTS),
]


def ragged_config(folder, valid_rows, evaluation=None, **sections):
    return make_config(
        folder,
        data={
            "source": "tests.trainer.sources:ragged",
            "source_options": {"valid_rows": valid_rows},
            "paths": [],
        },
        eval={"interval": 2, **(evaluation or {"iters": 10})},
        **sections,
    )


class Recorder:
    """Takes the place of the logger."""

    def log_eval(self, step, metrics):
        self.metrics = metrics


def recorded(trainer, state):
    recorder = Recorder()
    loss = trainer._evaluate(state, 0, recorder)
    assert recorder.metrics["eval_loss"] == loss
    return recorder.metrics


def evaluate(trainer, state):
    metrics = recorded(trainer, state)
    return metrics["eval_loss"], metrics["eval_tokens"]


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


def placed(state, program):
    """A state of one device, on the program's devices."""
    abstract = program.abstract_state()
    return program.from_logical(
        jax.tree.map(lambda a, s: jax.device_put(np.asarray(a), s.sharding), state, abstract)
    )


def test_every_layout_reports_the_mean_over_the_rows(tmp_path):
    """3 rows are less than a global batch of 8, 11 are more; the rest of a batch is padding."""
    results = {}
    for parallel, microbatches, model in LAYOUTS:
        state = None
        for valid_rows in (3, 8, 11):
            trainer = make_trainer(
                ragged_config(
                    tmp_path,
                    valid_rows,
                    model=model,
                    parallel=parallel,
                    train={"num_microbatches": microbatches},
                )
            )
            if not parallel and microbatches == 1:
                state = weights = state or trainer.program.init_state()
                results[valid_rows] = expected(trainer, state, valid_rows)
            state = state or placed(weights, trainer.program)
            loss, tokens = evaluate(trainer, state)
            assert tokens == results[valid_rows][1] == sum(r % SEQ + 1 for r in range(valid_rows))
            assert math.isclose(loss, results[valid_rows][0], rel_tol=1e-6), (parallel, valid_rows)


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


def test_no_evaluation_needs_no_validation_split(tmp_path):
    result = train(tmp_path, data={"split": "100,0,0"}, train={"exit_interval": 2})
    assert (result.step, result.eval_loss) == (2, None)
    assert evaluations(tmp_path) == []


def test_an_interval_without_anything_to_evaluate_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.interval is 2, but eval\.iters is 0"):
        make_trainer(make_config(tmp_path, eval={"interval": 2, "iters": 0}))


def mean_loss(trainer, state, text):
    """Of the predictions of every token of ``text`` in rows of SEQ, from the logits, in NumPy."""
    total = 0.0
    for start in range(0, len(text) - 1, SEQ):
        piece = text[start : start + SEQ + 1]
        tokens = np.zeros((SEQ, SEQ), np.int32)
        tokens[:, : len(piece) - 1] = piece[:-1]
        last = np.arange(SEQ, dtype=np.int32)
        logits = np.asarray(trainer.program.next_token_logits(state["params"], tokens, last))
        logits = logits.astype(np.float64)[: len(piece) - 1]
        logits -= logits.max(axis=1, keepdims=True)
        labels = np.asarray(piece[1:])
        chosen = logits[np.arange(len(labels)), labels]
        total += float((np.log(np.exp(logits).sum(axis=1)) - chosen).sum())
    return total / (len(text) - 1)


def write_text(path, text):
    with IndexedDatasetWriter(path, "uint16") as writer:
        writer.add_document([np.asarray(text)])
        writer.finalize()
    return str(path)


@pytest.mark.parametrize("mesh", ["1 device", "data 2 x fsdp 2 x tensor 2"])
def test_full_validation_is_the_mean_over_every_token_of_each_set(tmp_path, mesh):
    rng = np.random.default_rng(5)
    short, long = rng.integers(0, 64, 40), rng.integers(0, 64, 9 * SEQ + 5)
    write_corpus(tmp_path)
    config = make_config(
        tmp_path,
        parallel=MESHES[mesh],
        data={
            "split": "1",
            "valid_sets": {
                "short": [write_text(tmp_path / "short", short)],
                "long": [write_text(tmp_path / "long", long)],
            },
        },
        eval={"interval": 2, "full_validation": True},
    )
    trainer = make_trainer(config)
    state = trainer.program.init_state()
    loss, tokens = evaluate(trainer, state)
    metrics = recorded(trainer, state)
    assert tokens == 39 + 9 * SEQ + 4
    assert metrics["eval_tokens/short"] == 39
    assert metrics["eval_tokens/long"] == 9 * SEQ + 4
    means = {"short": mean_loss(trainer, state, short), "long": mean_loss(trainer, state, long)}
    for name, mean in means.items():
        assert math.isclose(metrics[f"eval_loss/{name}"], mean, rel_tol=1e-6)
    both = (39 * means["short"] + (9 * SEQ + 4) * means["long"]) / tokens
    assert math.isclose(loss, both, rel_tol=1e-6)


def test_the_test_set_is_evaluated_once_after_the_last_step(tmp_path):
    with_, without = tmp_path / "with", tmp_path / "without"
    for folder, extra in ((with_, {"test": True}), (without, {})):
        train(folder, data={"split": "60,20,20"}, eval={"interval": 2, "iters": 1, **extra})
    *before, last = evaluations(with_)
    assert not any("test_loss" in record for record in before)
    assert last["step"] == 6 and last["test_tokens"] == 8 * SEQ
    assert saved_digests(with_, 6) == saved_digests(without, 6)
    for left, right in zip(evaluations(without), evaluations(with_), strict=True):
        assert left.items() <= right.items()


def test_the_test_loss_is_the_mean_over_the_test_sets_own_tokens(tmp_path):
    texts = {name: np.arange(50 + i) ** 2 % (61 - i) for i, name in enumerate("abc")}
    paths = {name: write_text(tmp_path / name, text) for name, text in texts.items()}
    data = {"train_paths": [paths["a"]], "valid_paths": [paths["b"]], "test_paths": [paths["c"]]}
    evaluation = {"interval": 2, "full_validation": True, "test": True}
    trainer = make_trainer(make_config(tmp_path, data={"paths": [], **data}, eval=evaluation))
    state, recorder = trainer.program.init_state(), Recorder()
    trainer._evaluate(state, 6, recorder, end=True)
    for name, kind in (("b", "eval"), ("c", "test")):
        mean = mean_loss(trainer, state, texts[name])
        assert math.isclose(recorder.metrics[f"{kind}_loss"], mean, rel_tol=1e-6)
        assert recorder.metrics[f"{kind}_tokens"] == len(texts[name]) - 1


@pytest.mark.parametrize(
    "data, evaluation, message",
    [
        ({}, {"test": True}, r"eval\.test is true, but the run never evaluates"),
        (
            {"split": "80,20"},
            {"interval": 2, "iters": 1, "test": True},
            "has no test share; .*eval",
        ),
        (
            {"split": "80,0,20"},
            {"interval": 2, "iters": 1, "test": True},
            "there is none: give val",
        ),
        (
            {"paths": [], "train_paths": ["a"], "test_paths": ["b"]},
            {},
            "eval.test is false, under which",
        ),
    ],
)
def test_a_test_set_that_would_not_be_evaluated_is_refused(tmp_path, data, evaluation, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(make_config(tmp_path, data=data, eval=evaluation))


def test_the_validation_split_stays_the_evaluation_loss_beside_named_sets(tmp_path):
    """Adding a set changes no figure that the run had without it."""
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    train(alone, eval={"interval": 3, "iters": 1})
    other = write_text(tmp_path / "other", np.arange(60) % 7)
    train(beside, data={"valid_sets": {"other": [other]}}, eval={"interval": 3, "iters": 1})
    for left, right in zip(evaluations(alone), evaluations(beside), strict=True):
        assert left.items() <= right.items()
        assert set(right) - set(left) == {"eval_loss/other", "eval_tokens/other"}
        assert right["eval_loss/other"] != right["eval_loss"]
    assert saved_digests(alone, 6) == saved_digests(beside, 6)


def test_full_validation_of_an_own_source_reads_its_last_row(tmp_path):
    trainer = make_trainer(ragged_config(tmp_path, 11, {"full_validation": True}))
    state = trainer.program.init_state()
    loss, tokens = evaluate(trainer, state)
    mean, count = expected(trainer, state, 11)
    assert tokens == count
    assert math.isclose(loss, mean, rel_tol=1e-6)


def test_iters_and_full_validation_exclude_each_other(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.iters \(2\) has no effect"):
        make_config(tmp_path, eval={"interval": 1, "iters": 2, "full_validation": True})
