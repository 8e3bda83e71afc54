"""Row sources for ``data.source=tests.trainer.sources:NAME``."""

import os
import signal
import time

import jax
import numpy as np

from jaxtron.errors import DataError

Row = dict[str, np.ndarray]


class Rows:
    """Rows of random ids; row r predicts its first ``1 + r % seq_length`` tokens."""

    def __init__(self, count: int, seq_length: int, vocab_size: int, seed: int) -> None:
        self._shape = (count, seq_length)
        self._vocab_size = vocab_size
        self._seed = seed

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, index: int) -> Row:
        rng = np.random.default_rng([self._seed, index])
        seq_length = self._shape[1]
        text = rng.integers(0, self._vocab_size, seq_length + 1, dtype=np.int32)
        mask = (np.arange(seq_length) <= index % seq_length).astype(np.float32)
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask}


def ragged(
    split: str, *, num_samples: int, seq_length: int, vocab_size: int, seed: int, valid_rows: int
) -> Rows:
    """As many training rows as asked for, ``valid_rows`` of validation whatever is asked for."""
    count = valid_rows if split == "valid" else num_samples
    return Rows(count, seq_length, vocab_size, seed + len(split))


class _Broken(Rows):
    def __init__(self, *arguments: int, first_bad: int) -> None:
        super().__init__(*arguments)
        self._first_bad = first_bad

    def __getitem__(self, index: int) -> Row:
        if index >= self._first_bad:
            raise DataError(f"row {index} cannot be read")
        return super().__getitem__(index)


def broken(
    split: str,
    *,
    num_samples: int,
    seq_length: int,
    vocab_size: int,
    seed: int,
    row: int,
    process: int = 0,
) -> Rows:
    """From ``row`` on, ``process`` cannot read."""
    arguments = (num_samples, seq_length, vocab_size, seed)
    return (
        _Broken(*arguments, first_bad=row) if jax.process_index() == process else Rows(*arguments)
    )


class _Acting(Rows):
    def __init__(self, *arguments: int, first: int, action: str) -> None:
        super().__init__(*arguments)
        self._first, self._action = first, action

    def __getitem__(self, index: int) -> Row:
        if index >= self._first and self._action == "stall":
            time.sleep(600)
        elif index >= self._first and self._action == "signal":
            self._action = ""
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


def acting(
    split: str,
    *,
    num_samples: int,
    seq_length: int,
    vocab_size: int,
    seed: int,
    row: int,
    action: str,
) -> Rows:
    """At ``row`` process 1 gets SIGTERM (``signal``) or reads for ever (``stall``)."""
    arguments = (num_samples, seq_length, vocab_size, seed)
    return (
        _Acting(*arguments, first=row, action=action)
        if jax.process_index() == 1
        else Rows(*arguments)
    )


def stalled(
    split: str, *, num_samples: int, seq_length: int, vocab_size: int, seed: int, row: int
) -> Rows:
    """From ``row`` on, a read does not return."""
    return _Acting(num_samples, seq_length, vocab_size, seed, first=row, action="stall")
