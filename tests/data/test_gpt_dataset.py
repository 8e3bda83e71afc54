"""Megatron's sampling, against a slow sample-by-sample reference written from its description."""

import time
from pathlib import Path

import numpy as np
import pytest

from jaxtron.data.cache import cached_arrays
from jaxtron.data.gpt import GPTDataset
from jaxtron.data.gpt_indices import (
    build_gpt_indices,
    build_sample_index,
    document_index_dtype,
    num_epochs,
    sample_index_dtype,
    samples_before_final_epoch,
    shuffle_index_dtype,
)
from jaxtron.data.indexed import IndexedDataset, IndexedDatasetWriter
from jaxtron.data.masks import RowFormat
from jaxtron.data.split import Span
from jaxtron.errors import DataError


def reference(lengths, start, stop, num_samples, seq_length, seed):
    """Document, sample and shuffle index by counting tokens one sample at a time."""
    ids = list(range(start, stop))
    per_epoch = sum(lengths[i] for i in ids)
    epochs, tokens = 1, per_epoch
    while num_samples is not None and tokens < num_samples * seq_length + 1:
        epochs += 1
        tokens += per_epoch
    separate, before = False, 0
    if epochs > 1:
        before = ((epochs - 1) * per_epoch - 1) // seq_length
        last = num_samples - before
        samples_per_epoch = (per_epoch - 1) // seq_length
        assert 0 <= last <= samples_per_epoch + 1
        separate = last < int(0.80 * samples_per_epoch)

    rng = np.random.RandomState(seed)
    if separate:
        head = np.array(ids * (epochs - 1), dtype=np.int32)
        rng.shuffle(head)
        tail = np.array(ids, dtype=np.int32)
        rng.shuffle(tail)
        documents = np.concatenate([head, tail])
    else:
        documents = np.array(ids * epochs, dtype=np.int32)
        rng.shuffle(documents)

    count = (epochs * per_epoch - 1) // seq_length
    samples, document, offset = [(0, 0)], 0, 0
    for _ in range(count):
        remaining = seq_length + 1
        while True:
            available = lengths[documents[document]] - offset
            remaining -= available
            if remaining <= 0:
                offset += remaining + available - 1
                break
            document, offset = document + 1, 0
        samples.append((document, offset))

    if separate:
        head = np.arange(before, dtype=np.uint32)
        rng.shuffle(head)
        tail = np.arange(before, count, dtype=np.uint32)
        rng.shuffle(tail)
        shuffled = np.concatenate([head, tail])
    else:
        shuffled = np.arange(count, dtype=np.uint32)
        rng.shuffle(shuffled)
    return documents, samples, shuffled, separate


CASES = {
    "one epoch": ([50, 3, 20, 0, 31, 7], 0, 6, 9, 10, 1234),
    "no number of samples": ([50, 3, 20, 0, 31, 7], 0, 6, None, 10, 1234),
    "few of the last epoch": ([50, 3, 20, 0, 31, 7], 0, 6, 25, 10, 1),
    "most of the last epoch": ([50, 3, 20, 0, 31, 7], 0, 6, 32, 10, 1),
    "many epochs": ([50, 3, 20, 0, 31, 7], 0, 6, 500, 10, 7),
    "a part of the set": ([50, 3, 20, 0, 31, 7, 1, 1, 90], 2, 8, 44, 5, 42),
    "documents of one token": ([1] * 37, 0, 37, 100, 4, 3),
    "documents as long as a row": ([8] * 5, 0, 5, 30, 8, 3),
    "documents of a row and one": ([9] * 5, 0, 5, 30, 8, 3),
    "empty documents first and last": ([0, 0, 5, 0, 0, 6, 0, 0], 0, 8, 20, 4, 11),
    "an epoch shorter than a row": ([3, 2], 0, 2, 7, 16, 5),
    "rows of one token": ([4, 0, 3], 0, 3, 20, 1, 5),
    "a single document": ([100], 0, 1, 55, 7, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_indices_equal_the_reference(case):
    lengths, start, stop, num_samples, seq_length, seed = CASES[case]
    got = build_gpt_indices(
        np.array(lengths, dtype=np.int32),
        start,
        stop,
        num_samples=num_samples,
        seq_length=seq_length,
        seed=seed,
    )
    documents, samples, shuffled, _ = reference(*CASES[case])
    assert got.document_index.tolist() == documents.tolist()
    assert got.sample_index.tolist() == [list(s) for s in samples]
    assert got.shuffle_index.tolist() == shuffled.tolist()
    assert got.document_index.dtype == np.int32
    assert got.sample_index.dtype == np.int32
    assert got.shuffle_index.dtype == np.uint32


def test_indices_equal_the_reference_on_random_corpora():
    rng = np.random.default_rng(0)
    separate_seen = set()
    for trial in range(150):
        lengths = rng.integers(0, 30, size=rng.integers(1, 20)).astype(np.int32)
        lengths[0] += 1
        seq_length = int(rng.integers(1, 25))
        num_samples = int(rng.integers(0, 120))
        got = build_gpt_indices(
            lengths, 0, len(lengths), num_samples=num_samples, seq_length=seq_length, seed=trial
        )
        documents, samples, shuffled, separate = reference(
            lengths.tolist(), 0, len(lengths), num_samples, seq_length, trial
        )
        separate_seen.add(separate)
        assert np.array_equal(got.document_index, documents)
        assert np.array_equal(got.sample_index, samples)
        assert np.array_equal(got.shuffle_index, shuffled)
    assert separate_seen == {True, False}


def test_the_80_percent_rule_at_its_edge():
    # 101 tokens, S = 10: 10 samples an epoch; epoch one ends inside sample 10.
    # Of two epochs 10 samples precede the last one; 8 of its 10 are 80 %.
    assert num_epochs(10, 101, 10) == 1
    assert num_epochs(11, 101, 10) == 2
    assert samples_before_final_epoch(10, 1, 101, 10) is None
    assert samples_before_final_epoch(17, 2, 101, 10) == 10
    assert samples_before_final_epoch(18, 2, 101, 10) is None
    assert samples_before_final_epoch(None, 1, 101, 10) is None


def test_index_types_hold_what_they_count():
    assert document_index_dtype(2**31 - 1) == np.int32
    assert document_index_dtype(2**31) == np.int64
    assert sample_index_dtype(2**31 - 1, 2**31 - 1) == np.int32
    assert sample_index_dtype(2**31, 5) == np.int64
    assert sample_index_dtype(5, 2**31) == np.int64
    assert shuffle_index_dtype(2**32 - 3) == np.uint32
    assert shuffle_index_dtype(2**32 - 2) == np.int64
    epochs = num_epochs(2**40, 7, 2**20)
    assert 7 * (epochs - 1) < 2**60 + 1 <= 7 * epochs


def test_token_counts_beyond_32_bits_do_not_overflow():
    lengths = np.full(5, 2**30, dtype=np.int32)
    index = build_sample_index(lengths, 2**29)
    assert index.tolist() == [[j // 2, (j % 2) * 2**29] for j in range(10)]


def test_a_million_documents_are_indexed_in_seconds():
    lengths = np.random.default_rng(0).integers(1, 900, size=1_000_000).astype(np.int32)
    start = time.perf_counter()
    build_gpt_indices(lengths, 0, len(lengths), num_samples=None, seq_length=256, seed=1)
    assert time.perf_counter() - start < 15


@pytest.fixture(name="indexed")
def _indexed(tmp_path):
    with IndexedDatasetWriter(tmp_path / "corpus", "uint16") as writer:
        first = 0
        for length in (50, 3, 20, 0, 31, 7):
            writer.add_document([np.arange(first, first + length)])
            first += 100
    return IndexedDataset(tmp_path / "corpus")


def make(indexed, **changes):
    arguments = {"num_samples": 25, "seq_length": 10, "seed": 1, "vocab_size": 600} | changes
    return GPTDataset(indexed, arguments.pop("span", Span(0, 6)), **arguments)


def test_rows_are_consecutive_tokens_of_the_shuffled_documents(indexed):
    dataset = make(indexed)
    documents, _, shuffled, _ = reference([50, 3, 20, 0, 31, 7], 0, 6, 25, 10, 1)
    row_of_documents = np.concatenate([indexed[d] for d in documents])
    assert len(dataset) == len(shuffled) == (3 * 111 - 1) // 10
    for k, sample in enumerate(shuffled.tolist()):
        text = row_of_documents[sample * 10 : sample * 10 + 11]
        row = dataset[k]
        assert row["tokens"].tolist() == text[:-1].tolist()
        assert row["labels"].tolist() == text[1:].tolist()
        assert row["loss_mask"].tolist() == [1.0] * 10


def test_a_split_reads_its_own_documents_only(indexed):
    dataset = make(indexed, span=Span(2, 5), num_samples=40)
    seen = set(np.concatenate([dataset[k]["tokens"] for k in range(len(dataset))]) // 100)
    assert seen == {2, 4}


def test_rows_outside_the_dataset_do_not_exist(indexed):
    dataset = make(indexed)
    for k in (-1, len(dataset)):
        with pytest.raises(IndexError, match=rf"row {k} of {len(dataset)}"):
            dataset[k]


def test_row_format_reaches_the_rows(indexed):
    row = make(indexed, row_format=RowFormat(eod=49, reset_position_ids=True))[0]
    assert set(row) == {"tokens", "labels", "loss_mask", "position_ids"}


def test_an_id_the_model_does_not_have_names_dataset_document_and_id(indexed):
    dataset = make(indexed, vocab_size=430, num_samples=11, span=Span(0, 5))
    message = r"corpus \(train\): document 4 holds id 430 \(sequence 4, token 30\).*ids 0 to 429"
    with pytest.raises(DataError, match=message):
        list(map(dataset.__getitem__, range(len(dataset))))


def test_the_vocabulary_size_itself_is_already_too_large(tmp_path):
    with IndexedDatasetWriter(tmp_path / "a", "int32") as writer:
        writer.add_document([np.array([1, 99, 100])])
    dataset = make(IndexedDataset(tmp_path / "a"), span=Span(0, 1), num_samples=1, seq_length=2)
    assert dataset[0]["labels"].tolist() == [99, 100]
    dataset.vocab_size = 100
    with pytest.raises(DataError, match="document 0 holds id 100"):
        dataset[0]


def test_a_negative_id_is_refused(tmp_path):
    with IndexedDatasetWriter(tmp_path / "a", "int64") as writer:
        writer.add_document([np.array([1, -5, 2**31 + 5])])
    dataset = make(IndexedDataset(tmp_path / "a"), span=Span(0, 1), num_samples=1, seq_length=2)
    with pytest.raises(DataError, match="id -5"):
        dataset[0]


def test_sets_without_tokens_or_without_integers_are_refused(tmp_path, indexed):
    with pytest.raises(DataError, match="hold no token"):
        make(indexed, span=Span(3, 4))
    with IndexedDatasetWriter(tmp_path / "f", "float32") as writer:
        writer.add_document([np.zeros(9, dtype=np.float32)])
    with pytest.raises(DataError, match="float32"):
        make(IndexedDataset(tmp_path / "f"), span=Span(0, 1))


def test_the_cache_gives_the_same_rows_and_is_used(indexed, tmp_path, monkeypatch):
    plain = make(indexed)
    cache = tmp_path / "cache"
    make(indexed, cache_dir=cache)
    assert len(list(cache.iterdir())) == 1

    def fail(*args, **kwargs):
        raise AssertionError("built again")

    monkeypatch.setattr("jaxtron.data.gpt.build_gpt_indices", fail)
    again = make(indexed, cache_dir=cache)
    for k in range(len(plain)):
        assert np.array_equal(plain[k]["tokens"], again[k]["tokens"])
    for change in ({"seed": 2}, {"num_samples": 26}, {"seq_length": 9}, {"span": Span(0, 5)}):
        with pytest.raises(AssertionError, match="built again"):
            make(indexed, cache_dir=cache, **change)
    # The order follows from the lengths alone: other documents of the same lengths share it.
    for name, lengths in (("same", [50, 3, 20, 0, 31, 7]), ("other", [50, 3, 20, 1, 30, 7])):
        with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
            for length in lengths:
                writer.add_document([np.full(length, 7, np.uint16)])
    assert set(make(IndexedDataset(tmp_path / "same"), cache_dir=cache)[0]["tokens"]) == {7}
    with pytest.raises(AssertionError, match="built again"):
        make(IndexedDataset(tmp_path / "other"), cache_dir=cache)


def test_a_cache_entry_written_meanwhile_by_another_process_is_taken(tmp_path):
    def build():
        return {"x": np.arange(3)}

    def build_slowly():
        cached_arrays(tmp_path, {"a": 1}, build)  # the other process, from start to end
        return build()

    assert cached_arrays(tmp_path, {"a": 1}, build_slowly)["x"].tolist() == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 1


def _empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_empty, Path.unlink, lambda p: p.write_bytes(b"x" * 130)])
@pytest.mark.parametrize("name", ["x.npy", "sizes.json"])
def test_a_damaged_cache_entry_says_what_to_delete(tmp_path, damage, name):
    cached_arrays(tmp_path, {"a": 1}, lambda: {"x": np.arange(3), "y": np.arange(3)})
    [entry] = tmp_path.iterdir()
    damage(entry / name)
    with pytest.raises(DataError, match=f"{entry}: .*delete this folder"):
        cached_arrays(tmp_path, {"a": 1}, dict)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        cached_arrays(tmp_path / "file", {"a": 1}, dict)
