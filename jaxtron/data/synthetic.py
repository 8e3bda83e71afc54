"""A dataset without files: a noisy cycle, for trying a layout and for tests.

All ids but eod stand on one cycle in an order drawn from the seed. With probability 1 - `NOISE` a
token is the successor of the one before it, otherwise it is drawn uniformly: a model that has
learnt the successor table reaches the loss of :func:`entropy`, one that has learnt nothing
ln(vocab). When an eod id is given, documents end at random places and the next one starts anywhere.
"""

import math

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.masks import Row, RowFormat
from jaxtron.data.split import SPLIT_NAMES
from jaxtron.errors import ConfigError

NOISE = 0.1
_DOCUMENTS_PER_ROW = 4


def entropy(vocab_size: int) -> float:
    """Lowest mean loss that a model can reach without eod [nats per token]."""
    other = NOISE / vocab_size
    successor = 1.0 - NOISE + other
    return -successor * math.log(successor) - (vocab_size - 1) * other * math.log(other)


class SyntheticDataset:
    """Random access to rows that are a function of (seed, split, row number).

    Args:
        split: train, valid or test; they share the successor table but no rows.
        num_samples: number of rows.
        seq_length: tokens per row.
        vocab_size: ids are in `[0, vocab_size)`.
        seed: seed of the table and of the rows, below 2^32.
        row_format: what is made of the end-of-document id.

    Raises:
        ConfigError: `num_samples` is None, which asks for all rows there are.
    """

    def __init__(
        self,
        split: str,
        *,
        num_samples: int | None,
        seq_length: int,
        vocab_size: int,
        seed: int,
        row_format: RowFormat | None = None,
    ) -> None:
        if num_samples is None:
            raise ConfigError(
                "eval.full_validation is true, but the rows of data.source synthetic have no end; "
                "set eval.iters to a number of batches instead"
            )
        self.name = f"synthetic ({split})"
        self.seq_length = seq_length
        self.row_format = row_format or RowFormat()
        self._num_samples = num_samples
        self._stream = (seed, SPLIT_NAMES.index(split))
        ids = np.arange(vocab_size, dtype=np.int32)
        # RandomState and not Generator: its streams are the same in every version of NumPy.
        self._cycle = np.random.RandomState(seed).permutation(ids[ids != self.row_format.eod])

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Row:
        """Row `index`; see :meth:`RowFormat.row`."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.name}")
        return self.row_format.row(self.text(index))

    def text(self, index: int) -> NDArray[np.int32]:
        """The tokens of row `index`, `[seq + 1]`."""
        size = self.seq_length + 1
        rng = np.random.RandomState([*self._stream, index & 0xFFFFFFFF, index >> 32])
        restart = rng.random_sample(size) < NOISE
        places = rng.randint(self._cycle.size, size=size)
        ends = rng.random_sample(size) * size < _DOCUMENTS_PER_ROW
        if self.row_format.eod is not None:
            restart[1:] |= ends[:-1]
        restart[0] = True
        steps = np.arange(size)
        last_restart = np.maximum.accumulate(np.where(restart, steps, 0))
        text = self._cycle[(places[last_restart] + steps - last_restart) % self._cycle.size]
        if self.row_format.eod is not None:
            text[ends] = self.row_format.eod
        return text
