"""From the `data` section to datasets, and what it refuses."""

import functools
import sys
import types

import numpy as np
import pytest

from jaxtron.data.build import build_datasets
from jaxtron.data.config import DataConfig
from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.errors import ConfigError, DataError

SIZES = {"train_samples": 20, "valid_samples": 0, "test_samples": 0}


def corpus(path, documents, length=12, first=0, dtype="uint16"):
    with IndexedDatasetWriter(path, dtype) as writer:
        for d in range(documents):
            writer.add_document([np.full(length, first + d)])
    return str(path)


def build(vocab_size=1000, seed=1, sizes=SIZES, **keys):
    config = DataConfig(**({"seq_length": 8} | keys))
    return build_datasets(config, vocab_size=vocab_size, seed=seed, **{**SIZES, **sizes})


def documents_of(dataset):
    return {int(t) for k in range(len(dataset)) for t in dataset[k]["labels"]}


def test_splits_of_one_corpus_share_no_document(tmp_path):
    path = corpus(tmp_path / "a", 100)
    sizes = {"train_samples": 200, "valid_samples": 20, "test_samples": 20}
    datasets = build(paths=[path], split="8,1,1", sizes=sizes)
    assert documents_of(datasets.train) == set(range(80))
    assert documents_of(datasets.valid) == set(range(80, 90))
    assert documents_of(datasets.test) == set(range(90, 100))
    assert len(datasets.train) >= 200
    assert len(datasets.valid) >= 20
    assert "(valid)" in datasets.valid.name


def test_splits_that_nobody_reads_are_not_built(tmp_path):
    path = corpus(tmp_path / "a", 10)
    datasets = build(paths=[path], split="99,1,0")
    assert datasets.valid is None
    assert datasets.test is None


@pytest.mark.parametrize("documents", [10, 49])
def test_an_empty_validation_split_is_refused_at_start(tmp_path, documents):
    path = corpus(tmp_path / "a", documents)
    message = rf"valid split is empty.*\[{documents}, {documents}\) of {documents}.*interval=0"
    with pytest.raises(DataError, match=message):
        build(paths=[path], split="99,1,0", sizes={"valid_samples": 4})


def test_a_validation_split_shorter_than_a_row_is_refused(tmp_path):
    path = corpus(tmp_path / "a", 51, length=8)
    with pytest.raises(DataError, match="8 tokens, and one row needs 9"):
        build(paths=[path], split="99,1,0", sizes={"valid_samples": 4})
    path = corpus(tmp_path / "b", 51, length=9)
    assert build(paths=[path], split="99,1,0", sizes={"valid_samples": 4}).valid is not None


def test_a_split_of_weight_zero_is_skipped_with_a_warning(tmp_path, caplog):
    path = corpus(tmp_path / "a", 10)
    datasets = build(paths=[path], split="1", sizes={"valid_samples": 4})
    assert datasets.valid is None
    assert "valid" in caplog.text
    with pytest.raises(ConfigError, match="nothing to train on"):
        build(paths=[path], split="0,1")


def test_separate_paths_are_used_whole(tmp_path):
    a, b = corpus(tmp_path / "a", 10), corpus(tmp_path / "b", 5, first=500)
    datasets = build(
        train_paths=[a], valid_paths=[b], sizes={"train_samples": 50, "valid_samples": 50}
    )
    assert documents_of(datasets.train) == set(range(10))
    assert documents_of(datasets.valid) == set(range(500, 505))
    with pytest.raises(ConfigError, match=r"data\.valid_paths is empty.*eval\.interval=0"):
        build(train_paths=[a], sizes={"valid_samples": 4})


def test_a_weighted_blend_draws_in_proportion_and_repeats_small_sets(tmp_path):
    a, b, c = (corpus(tmp_path / n, 10, first=f) for n, f in (("a", 0), ("b", 100), ("c", 200)))
    train = build(paths=[3, a, 0, b, 1, c], sizes={"train_samples": 400}, split="1").train
    rows = [int(train[k]["tokens"][0]) // 100 for k in range(len(train))]
    assert len(rows) == 400
    assert [rows.count(n) for n in range(3)] == [300, 0, 100]


def test_a_component_of_weight_zero_is_not_even_opened(tmp_path):
    a = corpus(tmp_path / "a", 10)
    assert build(paths=[1, a, 0, str(tmp_path / "missing")], split="1").train is not None


def test_a_drawn_component_whose_split_is_empty_is_named(tmp_path):
    a, b = corpus(tmp_path / "a", 100), corpus(tmp_path / "b", 3)
    with pytest.raises(DataError, match=r"/b: the valid split is empty"):
        build(paths=[1, a, 1, b], split="9,1", sizes={"valid_samples": 4})


def test_sets_without_weights_are_read_once(tmp_path):
    a, b = corpus(tmp_path / "a", 10), corpus(tmp_path / "b", 30, first=100)
    rows_of_a, rows_of_b = (10 * 12 - 1) // 8, (30 * 12 - 1) // 8
    total = rows_of_a + rows_of_b
    train = build(
        paths=[a, b, corpus(tmp_path / "none", 0)], split="1", sizes={"train_samples": total}
    ).train
    rows = [int(train[k]["tokens"][-1]) // 100 for k in range(len(train))]
    assert [rows.count(0), rows.count(1)] == [rows_of_a, rows_of_b]
    with pytest.raises(DataError, match=f"has {total} train rows.*reads {total + 1}"):
        build(paths=[a, b], split="1", sizes={"train_samples": total + 1})


def test_a_blend_within_a_blend_of_another_stored_type(tmp_path):
    """Each level follows the greedy rule for itself; the parts are sampled as sets alone are."""
    a, b = corpus(tmp_path / "a", 40), corpus(tmp_path / "b", 30, first=100)
    c = corpus(tmp_path / "c", 20, first=70_000, dtype="int32")
    row = functools.partial(build, vocab_size=71_000, split="1")
    blend = row(paths=[0.3, a, 0.7, [0.25, b, 0.75, [c]]], sizes={"train_samples": 100}).train

    def greedy(weights, size):
        drawn, order = [0] * len(weights), []
        for i in range(size):
            behind = [w * max(i, 1) - n for w, n in zip(weights, drawn)]
            order.append(behind.index(max(behind)))
            drawn[order[-1]] += 1
        return order

    outer = greedy([0.3, 0.7], 100)
    inner = iter(greedy([0.25, 0.75], 100))
    kinds = [2 if d and next(inner) else d for d in outer]
    firsts = [
        [0, 100, 70_000].index(max(f for f in (0, 100, 70_000) if f <= int(t)))
        for t in (blend[k]["tokens"][0] for k in range(100))
    ]
    assert firsts == kinds
    assert [kinds.count(kind) for kind in range(3)] == [30, 18, 52]


def test_evaluation_of_a_nested_blend_reads_every_token_of_what_it_draws(tmp_path):
    a, b, c = (corpus(tmp_path / n, 3, first=f) for n, f in (("a", 50), ("b", 100), ("c", 200)))
    paths = [0.5, [0, a, 1, b], 0.5, c]
    keys = {"train_paths": [a], "valid_paths": paths}
    valid = build(**keys, sizes={"valid_samples": None}).valid
    padding = {0}
    assert documents_of(valid) - padding == {100, 101, 102, 200, 201, 202}


def test_the_cache_changes_no_row(tmp_path):
    a, b = corpus(tmp_path / "a", 10), corpus(tmp_path / "b", 30, first=100)
    keys = {"paths": [0.3, a, 0.7, b], "split": "1"}
    plain = build(**keys).train
    for _ in range(2):
        cached = build(**keys, cache_dir=str(tmp_path / "cache")).train
        assert len(cached) == len(plain)
        for k in range(len(plain)):
            assert np.array_equal(plain[k]["tokens"], cached[k]["tokens"])
    assert len(list((tmp_path / "cache").iterdir())) == 3  # two components and the blend


def test_eod_comes_from_the_key_or_else_from_the_tokenizer(tmp_path):
    path = corpus(tmp_path / "a", 1000)
    switches = {"reset_position_ids": True, "eod_mask_loss": True, "split": "1", "paths": [path]}
    with pytest.raises(ConfigError, match=r"data\.reset_position_ids, data\.eod_mask_loss: needs"):
        build(**switches)
    byte = build(**switches, tokenizer="byte").train
    assert byte.row_format.eod == 256
    assert build(**switches, tokenizer="byte", eod_token=3).train.row_format.eod == 3
    row = build(**switches, eod_token=3, sizes={"train_samples": 1500}).train
    masked = [k for k in range(len(row)) if (row[k]["loss_mask"] == 0).any()]
    assert masked and all((row[k]["tokens"] == 3).any() for k in masked)


@pytest.mark.parametrize("pad, loss", [(None, 1), (7, 1), (3, 0)])
def test_padding_is_masked_unless_it_is_also_the_end_of_document(tmp_path, monkeypatch, pad, loss):
    tokenizer = types.SimpleNamespace(vocab_size=10, eod=7, pad=pad)
    monkeypatch.setattr("jaxtron.data.build.load_tokenizer", lambda spec: tokenizer)
    with IndexedDatasetWriter(tmp_path / "a", "uint16") as writer:
        writer.add_document([np.array([1, 3, 7, 1, 3, 7, 1, 3, 7])])
    keys = {"paths": [str(tmp_path / "a")], "split": "1", "tokenizer": "any"}
    row = build(**keys, sizes={"train_samples": 1}).train[0]
    assert row["loss_mask"].tolist() == [loss, 1, 1, loss, 1, 1, loss, 1]


@pytest.mark.parametrize(
    "keys, message",
    [
        ({}, "data.paths is empty"),
        ({"paths": ["a"], "train_paths": ["b"]}, "both set"),
        ({"paths": ["a"], "split": "0"}, "data.split"),
        ({"paths": ["a"], "source_options": {"x": 1}}, "data.source_options"),
        ({"source": "synthetic", "paths": ["a"]}, "data.paths names"),
        ({"source": "synthetic", "valid_paths": ["a"]}, "data.valid_paths names"),
        ({"source": "synthetic", "source_options": {"x": 1}}, "data.source_options"),
        ({"source": "nonsense"}, "data.source is 'nonsense'"),
        ({"source": "no_such_module:f"}, "no_such_module"),
        ({"source": "json:no_such_function"}, "no_such_function"),
        ({"source": "synthetic", "eod_token": 1000}, "data.eod_token is 1000"),
        ({"source": "synthetic", "tokenizer": "byte", "vocab_size": 256}, "at least 257"),
        ({"source": "synthetic", "seed": 2**32}, "train.seed"),
    ],
)
def test_keys_that_cannot_work_are_refused_by_name(keys, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        build(**keys)


def test_a_missing_pair_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.idx: no such file"):
        build(paths=[str(tmp_path / "nowhere")])


def test_synthetic_needs_no_files():
    datasets = build(source="synthetic", sizes={"valid_samples": 6}, vocab_size=16)
    assert len(datasets.train) == 20
    assert len(datasets.valid) == 6
    assert datasets.test is None
    assert datasets.train[0]["tokens"].max() < 16


class CountingRows:
    def __init__(self, num_samples, seq_length, step):
        self.num_samples, self.seq_length, self.step = num_samples, seq_length, step

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        text = (np.arange(self.seq_length + 1) * self.step + index).astype(np.int32)
        mask = np.ones(self.seq_length, dtype=np.float32)
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask}


def make_rows(split, *, num_samples, seq_length, vocab_size, seed, step):
    if split == "test":
        return None
    return CountingRows(num_samples, seq_length, step)


@pytest.fixture(name="outside")
def _outside(monkeypatch):
    module = types.ModuleType("someone_elses_data")
    module.make_rows = make_rows
    monkeypatch.setitem(sys.modules, "someone_elses_data", module)
    return {"source": "someone_elses_data:make_rows", "source_options": {"step": 2}}


def test_a_dataset_from_outside_is_plugged_in_by_name(outside):
    datasets = build(**outside, sizes={"valid_samples": 4})
    assert (len(datasets.train), len(datasets.valid)) == (20, 4)
    assert datasets.train[3]["tokens"].tolist() == [3, 5, 7, 9, 11, 13, 15, 17]
    assert datasets.train.name == "someone_elses_data:make_rows (train)"
    with pytest.raises(DataError, match="has no test split"):
        build(**outside, sizes={"test_samples": 4})


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "missing a required .*argument: 'step'; data.source_options"),
        ({"step": 2, "stap": 3}, "got an unexpected keyword argument 'stap'"),
        ({"step": 2, "seed": 3}, "data.source_options: seed comes from other keys"),
    ],
)
def test_wrong_options_of_a_source_from_outside_are_named(outside, options, message):
    with pytest.raises(ConfigError, match=message):
        build(**outside | {"source_options": options})


def test_rows_from_outside_are_checked(outside):
    with pytest.raises(DataError, match=r"labels\[7\] of row 1 is 17.*ids 0 to 16"):
        build(**outside, vocab_size=17).train[1]
    train = build(**outside, eod_token=1, reset_attention_mask=True).train
    with pytest.raises(DataError, match="row 0 is .*expected arrays .*segment_ids"):
        train[0]
    train = build(**outside).train
    train._rows.seq_length = 5
    with pytest.raises(DataError, match=r"tokens of row 0 is int32 \[5\], expected int32 \[8\]"):
        train[0]
