"""Batches: which samples they hold, whoever reads them and from wherever the run goes on."""

import itertools
import multiprocessing
import os
import signal

import numpy as np
import pytest

from jaxtron.data.gpt import GPTDataset
from jaxtron.data.indexed import IndexedDataset, IndexedDatasetWriter
from jaxtron.data.loader import batches
from jaxtron.data.split import Span
from jaxtron.data.synthetic import SyntheticDataset
from jaxtron.errors import ConfigError, DataError


class Numbered:
    """Row i holds the number i."""

    name = "numbered"

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {
            "tokens": np.full(3, index + 1, dtype=np.int32),
            "loss_mask": np.ones(3, dtype=np.float32),
        }


def numbers(iterator, steps=None):
    return [(b["tokens"][:, 0] - 1).tolist() for b in itertools.islice(iterator, steps)]


def make(size=26, **changes):
    arguments = {"global_batch_size": 4, "start_sample": 0, "rows": range(4)} | changes
    return batches(Numbered(size), **arguments)


@pytest.mark.parametrize("num_threads", [0, 1, 4])
def test_single_goes_through_the_dataset_once_and_drops_the_incomplete_end(num_threads):
    expected = [[4 * g, 4 * g + 1, 4 * g + 2, 4 * g + 3] for g in range(6)]
    assert numbers(make(num_threads=num_threads)) == expected


def test_batches_are_arrays_of_rows():
    batch = next(make())
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        "tokens": ((4, 3), "int32"),
        "loss_mask": ((4, 3), "float32"),
    }
    assert type(batch["tokens"]) is np.ndarray


def test_a_process_reads_only_its_rows():
    read = []

    class Watched(Numbered):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    dataset = Watched(24)
    got = numbers(batches(dataset, global_batch_size=8, start_sample=0, rows=[5, 2]))
    assert got == [[5, 2], [13, 10], [21, 18]]
    assert sorted(read) == [2, 5, 10, 13, 18, 21]


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
def test_a_run_goes_on_at_any_sample_with_any_cut_into_processes(dataloader_type):
    whole = numbers(make(dataloader_type=dataloader_type, seed=5), 6)
    flat = [i for batch in whole for i in batch]
    for consumed in (0, 4, 12, 20):
        rest = numbers(make(dataloader_type=dataloader_type, seed=5, start_sample=consumed), 1)
        assert rest == [flat[consumed : consumed + 4]]
    parts = [
        numbers(make(dataloader_type=dataloader_type, seed=5, start_sample=8, rows=rows), 4)
        for rows in ([0], [1, 2], [3])
    ]
    assert [list(itertools.chain(*rows)) for rows in zip(*parts)] == whole[2:]


def test_cyclic_shuffles_every_epoch_anew_and_does_not_end():
    flat = list(itertools.chain(*numbers(make(10, dataloader_type="cyclic", seed=5), 25)))
    epochs = [flat[start : start + 10] for start in range(0, 100, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10
    for number, epoch in enumerate(epochs):
        assert epoch == np.random.RandomState([5, number]).permutation(10).tolist()
    assert numbers(make(10, dataloader_type="cyclic", seed=6), 1) != [flat[:4]]


def test_the_end_of_a_finite_set_is_filled_with_rows_without_loss():
    got = list(make(10, pad_last=True))
    assert [b["tokens"][:, 0].tolist() for b in got] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert [b["loss_mask"][:, 0].tolist() for b in got][-1] == [1, 1, 0, 0]
    assert sum(b["loss_mask"].sum() for b in got) == 10 * 3
    assert len(list(make(8, pad_last=True))) == 2
    assert list(make(8, start_sample=8, pad_last=True)) == []


def test_a_set_smaller_than_one_batch_can_still_be_evaluated():
    (batch,) = make(1, pad_last=True)
    assert batch["loss_mask"].sum() == 3
    assert list(make(1)) == []


def test_worker_processes_give_the_same_batches():
    dataset = SyntheticDataset("train", num_samples=40, seq_length=8, vocab_size=11, seed=0)
    arguments = {"global_batch_size": 4, "start_sample": 3, "rows": [3, 0]}
    plain = list(batches(dataset, **arguments))
    workers = list(batches(dataset, num_workers=2, **arguments))
    assert len(plain) == len(workers) == 9
    for a, b in zip(plain, workers):
        assert all(np.array_equal(a[key], b[key]) for key in a)


def test_workers_read_on_after_the_signals_of_a_whole_job_step():
    dataset = SyntheticDataset("train", num_samples=40, seq_length=8, vocab_size=11, seed=0)
    arguments = {"global_batch_size": 4, "start_sample": 0, "rows": [0, 1]}
    others = set(multiprocessing.active_children())
    source = batches(dataset, num_workers=2, prefetch=1, **arguments)
    got = [next(source) for _ in range(2)]  # both workers are up
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGUSR1)
    got += source
    for a, b in zip(got, batches(dataset, **arguments), strict=True):
        assert all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    "reading",
    [
        {"num_threads": 0},
        {"num_threads": 2},
        pytest.param({"num_workers": 1}, marks=pytest.mark.slow),
    ],
)
def test_an_error_while_reading_reaches_the_caller_as_it_is(tmp_path, reading):
    with IndexedDatasetWriter(tmp_path / "a", "uint16") as writer:
        writer.add_document([np.full(100, 77)])
    dataset = GPTDataset(
        IndexedDataset(tmp_path / "a"),
        Span(0, 1),
        num_samples=None,
        seq_length=10,
        seed=0,
        vocab_size=77,
    )
    iterator = batches(dataset, global_batch_size=2, start_sample=0, rows=[0, 1], **reading)
    with pytest.raises(DataError, match="document 0 holds id 77"):
        next(iterator)


def test_arguments_that_cannot_work_are_refused_at_once():
    with pytest.raises(DataError, match="numbered: holds no rows"):
        make(0)
    with pytest.raises(ConfigError, match=r"data\.dataloader_type is 'random'"):
        make(dataloader_type="random")
    for bad in ({"rows": []}, {"rows": [4]}, {"start_sample": -1}):
        with pytest.raises(ValueError):
            make(**bad)
