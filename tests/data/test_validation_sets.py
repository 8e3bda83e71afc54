"""Named validation sets, and validation data read whole."""

import sys
import types

import numpy as np
import pytest

from jaxtron.data.build import build_datasets
from jaxtron.data.config import DataConfig
from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.errors import ConfigError, DataError

SEQ = 8


def corpus(path, lengths, first=0):
    """One document per length; token t of all of them is ``first + t``."""
    with IndexedDatasetWriter(path, "uint16") as writer:
        for length in lengths:
            writer.add_document([np.arange(first, first + length)])
            first += length
        writer.finalize()
    return str(path)


def build(valid_samples, **keys):
    config = DataConfig(**{"seq_length": SEQ, **keys})
    return build_datasets(
        config,
        vocab_size=1000,
        seed=1,
        train_samples=4,
        valid_samples=valid_samples,
        test_samples=0,
    )


def predicted(dataset):
    """Every token that carries a loss, in the order of the rows."""
    rows = [dataset[k] for k in range(len(dataset))]
    return [int(t) for row in rows for t in row["labels"][row["loss_mask"] > 0]]


@pytest.mark.parametrize("lengths", [[25], [3, 0, 13, 9, 1], [9, 0, 9, 8], [2], [0, 5, 0]])
def test_a_whole_set_predicts_every_token_once_in_order(tmp_path, lengths):
    path = corpus(tmp_path / "valid", lengths)
    valid = build(None, train_paths=[path], valid_paths=[path]).valid
    total = sum(lengths)
    assert predicted(valid) == list(range(1, total))
    assert len(valid) == -(-(total - 1) // SEQ)
    assert all(len(array) == SEQ for array in valid[len(valid) - 1].values())


def test_a_whole_split_is_the_documents_of_its_share(tmp_path):
    path = corpus(tmp_path / "a", [10] * 10)
    valid = build(None, paths=[path], split="8,2,0").valid
    assert predicted(valid) == list(range(81, 100))


def test_the_sets_of_a_blend_are_read_whole_one_after_another(tmp_path):
    a, b = corpus(tmp_path / "a", [12]), corpus(tmp_path / "b", [5, 5], first=100)
    c, empty = corpus(tmp_path / "c", [9], first=200), corpus(tmp_path / "empty", [])
    expected = [*range(1, 12), *range(101, 110), *range(201, 209)]
    for paths in ([a, b, empty, c], [3, a, 1, b, 9, empty, 1, c, 0, str(tmp_path / "missing")]):
        valid = build(None, train_paths=[a], valid_paths=paths).valid
        assert predicted(valid) == expected


def test_a_whole_set_without_a_token_to_predict_is_refused(tmp_path):
    a, one = corpus(tmp_path / "a", [20]), corpus(tmp_path / "one", [1])
    with pytest.raises(DataError, match=r"one: the valid split .* needs 2; .*eval\.interval=0"):
        build(None, train_paths=[a], valid_paths=[one])


def test_named_sets_are_used_whole_beside_the_validation_split(tmp_path):
    a, b = corpus(tmp_path / "a", [10] * 10), corpus(tmp_path / "b", [40], first=500)
    datasets = build(6, paths=[a], split="8,2,0", valid_sets={"code": [b], "mix": [1, a, 1, b]})
    assert list(datasets.valid_sets) == ["code", "mix"]
    assert set(predicted(datasets.valid)) <= set(range(80, 100))
    assert set(predicted(datasets.valid_sets["code"])) <= set(range(500, 540))
    mixed = [
        row["tokens"][0] >= 500 for row in map(datasets.valid_sets["mix"].__getitem__, range(6))
    ]
    assert sum(mixed) == 3


@pytest.mark.parametrize("files", [{"paths": "a", "split": "1"}, {"train_paths": "a"}])
def test_named_sets_need_no_validation_split(tmp_path, files, caplog):
    a = corpus(tmp_path / "a", [100])
    keys = {key: [a] if value == "a" else value for key, value in files.items()}
    datasets = build(3, **keys, valid_sets={"own": [a]})
    assert datasets.valid is None
    assert len(datasets.valid_sets["own"]) >= 3
    assert not caplog.records


def test_named_sets_are_not_opened_without_evaluation(tmp_path):
    a = corpus(tmp_path / "a", [100])
    assert not build(0, paths=[a], valid_sets={"own": [str(tmp_path / "missing")]}).valid_sets


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"valid_sets": {"own": []}}, r"data\.valid_sets\.own is empty"),
        ({"valid_sets": {"a/b": ["x"]}}, r"'a/b' is not a name"),
        ({"valid_sets": {"own": [1, "x", "y"]}}, r"data\.valid_sets\.own: 1 stands where"),
    ],
)
def test_named_sets_that_cannot_work_are_refused_by_name(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        build(3, paths=[corpus(tmp_path / "a", [100])], split="1", **keys)


def test_a_source_that_cannot_tell_all_its_rows_is_named(monkeypatch):
    class Rows:
        def __init__(self, count):
            self.count = count

        def __len__(self):
            return self.count

        def __getitem__(self, index):
            raise IndexError

    module = types.ModuleType("someone_elses_data")
    module.make_rows = lambda split, *, num_samples, **_: Rows(num_samples)
    monkeypatch.setitem(sys.modules, "someone_elses_data", module)
    with pytest.raises(DataError, match=r"valid dataset has no length.*num_samples=None"):
        build(None, source="someone_elses_data:make_rows")


def test_sources_without_files_refuse_what_needs_them():
    with pytest.raises(ConfigError, match=r"data\.valid_sets names"):
        build(3, source="synthetic", valid_sets={"own": ["x"]})
    with pytest.raises(ConfigError, match=r"eval\.full_validation is true.*no end"):
        build(None, source="synthetic")
