"""Rows of S tokens drawn from an indexed dataset, in Megatron's order."""

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.cache import cached_arrays, digest
from jaxtron.data.gpt_indices import GPTIndices, build_gpt_indices, build_whole_indices
from jaxtron.data.indexed import IndexedDataset
from jaxtron.data.masks import Row, RowFormat
from jaxtron.data.split import Span
from jaxtron.errors import DataError


class GPTDataset:
    """Random access to the training samples of one split of an indexed dataset.

    Row k is bit-identical to sample k of Megatron's GPTDataset with the same seed, split, sequence
    length and number of samples. Documents are laid end to end and cut every S tokens.

    Args:
        indexed: the tokens.
        span: the sequences that this split owns.
        num_samples: rows needed; the split is repeated as often as that takes. None: one epoch.
        seq_length: S, tokens per row.
        seed: seed of the order, below 2^32.
        vocab_size: ids of the model; a row with any other id is refused.
        row_format: what is made of end-of-document and padding ids.
        split_name: train, valid or test, for messages.
        cache_dir: folder that keeps the computed order between runs, or None.
        whole: every token of the split once, in the order of the file, whatever `num_samples` and
            `seed` say; the last row is filled with id 0, which carries no loss.
        transform: makes other tokens `[seq + 1]` of those of a row and its number, or None.

    Raises:
        DataError: the split has no token, or the set does not hold integers.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        span: Span,
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocab_size: int,
        row_format: RowFormat | None = None,
        split_name: str = "train",
        cache_dir: str | os.PathLike | None = None,
        whole: bool = False,
        transform: Callable[[NDArray, int], NDArray] | None = None,
    ) -> None:
        self.name = f"{indexed.prefix} ({split_name})"
        self.indexed = indexed
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.row_format = row_format or RowFormat()
        self.transform = transform
        if indexed.dtype.kind not in "iu":
            raise DataError(
                f"{self.name}: holds {indexed.dtype.name} values; token ids are integers"
            )
        lengths = indexed.sequence_lengths
        if not np.any(lengths[span.start : span.stop]):
            raise DataError(
                f"{self.name}: sequences [{span.start}, {span.stop}) hold no token to train on"
            )
        if whole:
            self.indices = build_whole_indices(lengths, *span, seq_length=seq_length)
        else:
            self.indices = _indices(lengths, span, num_samples, seq_length, seed, cache_dir)

    def __len__(self) -> int:
        """Rows there are: at least the number asked for, up to the end of the last epoch."""
        return len(self.indices.shuffle_index)

    def __getitem__(self, index: int) -> Row:
        """Row `index`, arrays `[seq]`; see :meth:`RowFormat.row`.

        Raises:
            DataError: the row holds an id outside `[0, vocab_size)`.
        """
        text = self.text(index)
        if text.min() < 0 or text.max() >= self.vocab_size:
            raise self._bad_id(index)
        if self.transform is not None:
            text = self.transform(text, index)
        missing = self.seq_length + 1 - text.size
        if not missing:
            return self.row_format.row(text)
        row = self.row_format.row(np.pad(text, (0, missing)))
        row["loss_mask"][-missing:] = 0.0
        return row

    def text(self, index: int) -> NDArray:
        """The tokens of row `index` in the dtype of the set, `[seq + 1]`.

        The last row of a `whole` set may have fewer.
        """
        pieces = [self.indexed.get(*piece) for piece in self._pieces(index)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def provenance(self, index: int) -> tuple[int, ...]:
        """Which tokens row `index` holds: first and last sequence, and the offsets in them."""
        pieces = self._pieces(index)
        sequence, offset, length = pieces[-1]
        return (*pieces[0][:2], sequence, offset + (length or 0))

    def fingerprints(self) -> list[int]:
        """Of the files that the rows come from; see :meth:`IndexedDataset.fingerprint`."""
        return [self.indexed.fingerprint()]

    def _pieces(self, index: int) -> list[tuple[int, int, int | None]]:
        """(sequence, offset, length) of every part of row `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.name}")
        sample = int(self.indices.shuffle_index[index])
        (first, begin), (last, end) = self.indices.sample_index[sample : sample + 2].tolist()
        sequences = self.indices.document_index[first : last + 1].tolist()
        if first == last:
            return [(sequences[0], begin, end + 1 - begin)]
        return [
            (sequences[0], begin, None),
            *((sequence, 0, None) for sequence in sequences[1:-1]),
            (sequences[-1], 0, end + 1),
        ]

    def _bad_id(self, index: int) -> DataError:
        for sequence, offset, length in self._pieces(index):
            tokens = self.indexed.get(sequence, offset, length)
            bad = (tokens < 0) | (tokens >= self.vocab_size)
            if np.any(bad):
                at = int(np.argmax(bad))
                return DataError(
                    f"{self.name}: document {self.indexed.document_of(sequence)} holds id "
                    f"{int(tokens[at])} (sequence {sequence}, token {offset + at}), but the model "
                    f"has ids 0 to {self.vocab_size - 1}; the set was made with another tokenizer, "
                    "or model.vocab_size is too small"
                )
        raise AssertionError("called for a row without a bad id")


def _indices(
    lengths: NDArray,
    span: Span,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    cache_dir: str | os.PathLike | None,
) -> GPTIndices:
    def build() -> dict[str, NDArray]:
        return vars(
            build_gpt_indices(
                lengths, *span, num_samples=num_samples, seq_length=seq_length, seed=seed
            )
        )

    if cache_dir is None:
        return GPTIndices(**build())
    description = {
        "kind": "GPTDataset indices, version 1",
        "lengths_sha256": digest(lengths[span.start : span.stop]),
        "start": span.start,
        "stop": span.stop,
        "num_samples": num_samples,
        "seq_length": seq_length,
        "seed": seed,
    }
    return GPTIndices(**cached_arrays(cache_dir, description, build))
