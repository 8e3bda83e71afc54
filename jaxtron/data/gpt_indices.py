"""Which tokens each training sample is made of, bit-identical to Megatron's GPTDataset.

Three arrays describe it, all functions of the sequence lengths, the number of samples, the sequence
length S and the seed:

* the document index: the order in which documents are laid end to end, epoch after epoch;
* the sample index: where in that row of documents each sample begins. A sample takes S + 1 tokens
  and the next one begins at its last token, so token j*S of the row is the first of sample j;
* the shuffle index: the order in which samples are drawn.

Source: Megatron-Core `core/datasets/gpt_dataset.py` and `helpers.cpp`. "Document" is Megatron's
word for what the indexed dataset calls a sequence. The random numbers are NumPy's legacy
`RandomState`, whose stream is frozen, drawn in Megatron's order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_INT32_MAX = 2**31 - 1
_FINAL_EPOCH_THRESHOLD = 0.80


@dataclass(frozen=True)
class GPTIndices:
    """The three arrays; see the module's description.

    Attributes:
        document_index: `[epochs * documents]`, sequence numbers of the indexed dataset.
        sample_index: `[samples + 1, 2]`, (position in document_index, token offset in that
            document) of the first token of each sample.
        shuffle_index: `[samples]`, the sample drawn k-th.
    """

    document_index: NDArray
    sample_index: NDArray
    shuffle_index: NDArray


def document_index_dtype(num_sequences: int) -> np.dtype:
    """Type that holds every sequence number of a set with `num_sequences` sequences."""
    return np.dtype(np.int32 if num_sequences <= _INT32_MAX else np.int64)


def sample_index_dtype(document_index_size: int, max_length: int) -> np.dtype:
    """Type that holds every position in the document index and every offset in a document."""
    return np.dtype(np.int32 if max(document_index_size, max_length) <= _INT32_MAX else np.int64)


def shuffle_index_dtype(num_samples: int) -> np.dtype:
    """Type that holds every sample number."""
    return np.dtype(np.uint32 if num_samples < 2**32 - 2 else np.int64)


def num_epochs(num_samples: int | None, tokens_per_epoch: int, seq_length: int) -> int:
    """Passes over the documents needed for `num_samples` samples; 1 without a request."""
    if num_samples is None:
        return 1
    needed = num_samples * seq_length + 1
    return max(1, -(-needed // tokens_per_epoch))


def samples_before_final_epoch(
    num_samples: int | None, epochs: int, tokens_per_epoch: int, seq_length: int
) -> int | None:
    """Samples of all epochs but the last, if the last epoch is shuffled apart; else None.

    It is when fewer than 80 % of its samples are needed: mixed with the others, it would make the
    run see an arbitrary part of the last epoch early and leave out parts of the full ones.
    """
    if num_samples is None or epochs == 1:
        return None
    before = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    if num_samples - before < int(_FINAL_EPOCH_THRESHOLD * per_epoch):
        return before
    return None


def build_document_index(
    documents: NDArray, epochs: int, separate_final_epoch: bool, rng: np.random.RandomState
) -> NDArray:
    """The documents `[documents]`, `epochs` times, shuffled together, `[epochs * documents]`.

    With `separate_final_epoch` the last epoch is shuffled by itself and stays at the end.
    """
    joint = epochs - 1 if separate_final_epoch else epochs
    index = np.tile(documents, epochs)
    rng.shuffle(index[: joint * documents.size])
    if separate_final_epoch:
        rng.shuffle(index[joint * documents.size :])
    return index


def build_sample_index(lengths: NDArray, seq_length: int) -> NDArray:
    """Where each sample begins, `[samples + 1, 2]`; the extra row is the end of the last one.

    Args:
        lengths: lengths of the documents in the order of the document index [tokens].
        seq_length: S; a sample has S + 1 tokens, an incomplete one at the end is dropped.
    """
    num_samples = (int(lengths.sum(dtype=np.int64)) - 1) // seq_length
    return _places(lengths, np.arange(1, num_samples + 1, dtype=np.int64) * seq_length)


def _places(lengths: NDArray, tokens: NDArray[np.int64]) -> NDArray:
    """(document, offset) of the start and of each of `tokens`, `[len(tokens) + 1, 2]`."""
    ends = np.cumsum(lengths, dtype=np.int64)
    # A token lies in the first document that ends behind it; this passes over empty documents.
    positions = np.searchsorted(ends, tokens, side="right")
    dtype = sample_index_dtype(len(lengths), int(lengths.max()))
    index = np.zeros((len(tokens) + 1, 2), dtype=dtype)  # row 0 is (0, 0) even if it is empty
    index[1:, 0] = positions
    index[1:, 1] = tokens - (ends[positions] - lengths[positions])
    return index


def build_shuffle_index(
    num_samples: int, before_final_epoch: int | None, rng: np.random.RandomState
) -> NDArray:
    """A shuffle of `[0, num_samples)`; the samples of a separate final epoch stay at the end."""
    index = np.arange(num_samples, dtype=shuffle_index_dtype(num_samples))
    if before_final_epoch is None:
        rng.shuffle(index)
    else:
        rng.shuffle(index[:before_final_epoch])
        rng.shuffle(index[before_final_epoch:])
    return index


def build_gpt_indices(
    sequence_lengths: NDArray,
    start: int,
    stop: int,
    *,
    num_samples: int | None,
    seq_length: int,
    seed: int,
) -> GPTIndices:
    """The three arrays for at least `num_samples` samples of sequences `[start, stop)`.

    Args:
        sequence_lengths: lengths of all sequences of the indexed dataset, `[sequences]` [tokens].
        start: first sequence of the split.
        stop: end of the split; `[start, stop)` must hold at least one token.
        num_samples: samples needed, over as many epochs as that takes; None: one epoch.
        seq_length: S, tokens per row.
        seed: seed of the shuffles.
    """
    tokens_per_epoch = int(sequence_lengths[start:stop].sum(dtype=np.int64))
    epochs = num_epochs(num_samples, tokens_per_epoch, seq_length)
    before = samples_before_final_epoch(num_samples, epochs, tokens_per_epoch, seq_length)
    rng = np.random.RandomState(seed)
    documents = np.arange(start, stop, dtype=document_index_dtype(stop))
    document_index = build_document_index(documents, epochs, before is not None, rng)
    sample_index = build_sample_index(sequence_lengths[document_index], seq_length)
    shuffle_index = build_shuffle_index(len(sample_index) - 1, before, rng)
    return GPTIndices(document_index, sample_index, shuffle_index)


def build_whole_indices(
    sequence_lengths: NDArray, start: int, stop: int, *, seq_length: int
) -> GPTIndices:
    """The three arrays for every token of sequences `[start, stop)` once, in the order of the file.

    The last sample has fewer than S + 1 tokens where S does not divide the tokens to predict.

    Args:
        sequence_lengths: lengths of all sequences of the indexed dataset, `[sequences]` [tokens].
        start: first sequence of the split.
        stop: end of the split; `[start, stop)` must hold at least two tokens.
        seq_length: S, tokens per row.
    """
    documents = np.arange(start, stop, dtype=document_index_dtype(stop))
    lengths = sequence_lengths[start:stop]
    last_token = int(lengths.sum(dtype=np.int64)) - 1
    bounds = np.append(np.arange(seq_length, last_token, seq_length, dtype=np.int64), last_token)
    sample_index = _places(lengths, bounds)
    samples = np.arange(len(bounds), dtype=shuffle_index_dtype(len(bounds)))
    return GPTIndices(documents, sample_index, samples)
