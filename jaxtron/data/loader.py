"""Batches of this process's rows, from any position of the run.

Step g of a run covers samples `[g*GBS, (g+1)*GBS)` of the dataset's order on every mesh and with
any number of processes; a process reads only its own rows of each. The position is one integer, the
number of samples consumed so far, which the checkpoint stores; it does not depend on how many
processes, threads or workers read.
"""

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from multiprocessing import resource_tracker
from typing import Any

import grain
import numpy as np
from absl import flags
from numpy.typing import NDArray

from jaxtron.data.masks import Row
from jaxtron.data.source import RowDataset
from jaxtron.errors import ConfigError, DataError
from jaxtron.resilience.exits import EXIT_SIGNALS

Batch = dict[str, NDArray]

_ENDLESS_STEPS = 2**40
_CLOSE_S = 5.0


def batches(
    dataset: RowDataset,
    *,
    global_batch_size: int,
    start_sample: int,
    rows: Sequence[int],
    dataloader_type: str = "single",
    seed: int = 0,
    pad_last: bool = False,
    num_workers: int = 0,
    num_threads: int = 1,
    prefetch: int = 2,
    stage: Callable[[Batch], Any] | None = None,
) -> Generator[Any, None, None]:
    """Iterate over the global batches from `start_sample` on, this process's rows of each.

    Args:
        dataset: the rows.
        global_batch_size: rows of a global batch, over all processes.
        start_sample: samples consumed before; the first batch starts with this one.
        rows: numbers, within each global batch, of the rows that this process needs.
        dataloader_type: `single`: the dataset's order, once. `cyclic`: without end; epoch e is the
            permutation `RandomState([seed, e]).permutation(len(dataset))`, and a batch may hold
            rows of two epochs.
        seed: of the `cyclic` permutations.
        pad_last: fill the last batch of `single` with rows of zeros whose loss mask is zero;
            without it, an incomplete last batch is dropped.
        num_workers: processes that read; 0: threads of this process. They are spawned, so the
            program's entry point needs `if __name__ == "__main__":`.
        num_threads: threads that read ahead; 0: read when asked.
        prefetch: batches read ahead.
        stage: what is made of each batch, by those who read.

    Returns:
        Batches of arrays `[len(rows), …]`, the keys of the dataset's rows, or what `stage` makes of
        them.

    Raises:
        ConfigError: no such `dataloader_type`.
        DataError: the dataset is empty; while iterating, what reading a row raises.
    """
    if not rows or not all(0 <= row < global_batch_size for row in rows):
        raise ValueError(f"rows {list(rows)} of a global batch of {global_batch_size}")
    if start_sample < 0:
        raise ValueError(f"start_sample is {start_sample}")
    if len(dataset) == 0:
        raise DataError(f"{dataset.name}: holds no rows")
    order: Callable[[int], int]
    if dataloader_type == "single":
        order, remaining = _in_order, max(0, len(dataset) - start_sample)
        steps = remaining // global_batch_size
        if pad_last and remaining % global_batch_size:
            steps += 1
    elif dataloader_type == "cyclic":
        order = functools.partial(shuffled_sample, seed, len(dataset))
        steps = _ENDLESS_STEPS
    else:
        raise ConfigError(
            f"data.dataloader_type is {dataloader_type!r}, expected 'single' or 'cyclic'"
        )
    source = _ProcessRows(dataset, order, start_sample, global_batch_size, tuple(rows), steps)
    # Batched before it becomes an iterator: the other way round, the batches would depend on the
    # number of workers.
    batched = grain.MapDataset.source(source).batch(len(rows), drop_remainder=True)
    if stage is not None:
        batched = batched.map(stage)
    read_options = grain.ReadOptions(
        num_threads=num_threads, prefetch_buffer_size=prefetch if num_threads else 0
    )
    iterable = batched.to_iter_dataset(read_options)
    if num_workers:
        if not flags.FLAGS.is_parsed():  # grain reads absl flags, which only absl programs parse
            flags.FLAGS.mark_as_parsed()
        _start_resource_tracker()
        iterable = iterable.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=prefetch),
            worker_init_fn=_tie_to_parent,
        )
    return _iterate(iterable)


def _iterate(iterable: grain.IterDataset) -> Generator[Any, None, None]:
    iterator = iter(iterable)
    try:
        yield from iterator
    finally:
        # Stops threads and workers when the caller ends early, and waits for the reads under way: a
        # stalled one must not keep a run from being saved. Of an interpreter that ends (nobody
        # closed this iterator), threads no longer run, and to start one would wait for ever.
        if not sys.is_finalizing():
            closing = threading.Thread(target=iterator.close, daemon=True)
            closing.start()
            closing.join(_CLOSE_S)


def _start_resource_tracker() -> None:
    """Start the process that multiprocessing frees memory with, such that no signal ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_SIGNALS)  # it inherits this
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tie_to_parent(worker: int, num_workers: int) -> None:
    """Make this worker live as long as the process that reads from it.

    SLURM sends a signal to all processes of a step; a worker that it ended would fail the read of
    the batch that the trainer still needs. Nor may one stay that nobody reads from.
    """
    for number in EXIT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _in_order(sample: int) -> int:
    return sample


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, size: int, epoch: int) -> NDArray[np.int64]:
    # RandomState and not Generator: its streams are the same in every version of NumPy.
    return np.random.RandomState([seed, epoch]).permutation(size)


def shuffled_sample(seed: int, size: int, sample: int) -> int:
    """Row that is sample number `sample` of the `cyclic` order of `size` rows."""
    epoch, place = divmod(sample, size)
    return int(_permutation(seed, size, epoch)[place])


class _ProcessRows:
    """This process's rows of all steps in a row, for Grain to cut into batches."""

    def __init__(
        self,
        dataset: RowDataset,
        order: Callable[[int], int],
        start_sample: int,
        global_batch_size: int,
        rows: tuple[int, ...],
        steps: int,
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._start_sample = start_sample
        self._global_batch_size = global_batch_size
        self._rows = rows
        self._steps = steps

    def __len__(self) -> int:
        return self._steps * len(self._rows)

    def __getitem__(self, index: int) -> Row:
        step, place = divmod(int(index), len(self._rows))
        sample = self._start_sample + step * self._global_batch_size + self._rows[place]
        if self._order is _in_order and sample >= len(self._dataset):
            return {key: np.zeros_like(array) for key, array in self._dataset[0].items()}
        return self._dataset[self._order(sample)]
