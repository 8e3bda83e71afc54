"""Turning blocks of records into token arrays, in this process or in several.

The result is a function of the records alone: blocks come back in the order in which they were
read, and a document's tokens depend on nothing but its text, so any number of workers gives the
same output.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.documents import Block, parse_records
from jaxtron.data.process_map import WorkerDiedError, process_map
from jaxtron.data.sentences import split_sentences
from jaxtron.data.tokenizers import Tokenizer
from jaxtron.errors import DataError


@dataclass(frozen=True)
class EncodeJob:
    """What to do with each record; it is sent to every worker once.

    Attributes:
        tokenizer: encodes the texts.
        keys: JSON keys whose texts are encoded, each into documents of its own.
        append_eod: end every document's last sequence with the end-of-document id.
        split_sentences: one sequence per sentence, instead of one per document.
        stop: give up a block at its first bad record.
    """

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    split_sentences: bool
    stop: bool


@dataclass(frozen=True)
class EncodedTexts:
    """The documents of one key in one block.

    Attributes:
        tokens: int32 ``[tokens]``, all sequences end to end.
        sequence_lengths: int64 ``[sequences]`` [tokens].
        document_lengths: int64 ``[documents]`` [sequences].
        skipped_empty: documents left out because they gave no token.
    """

    tokens: NDArray[np.int32]
    sequence_lengths: NDArray[np.int64]
    document_lengths: NDArray[np.int64]
    skipped_empty: int


@dataclass(frozen=True)
class EncodedBlock:
    """A block's documents per key, and its bad records as (reason, message)."""

    texts: dict[str, EncodedTexts]
    bad: list[tuple[str, str]]


class Encoder:
    """Encodes records one block at a time."""

    def __init__(self, job: EncodeJob) -> None:
        # One process uses one core: the tokenizer's own threads would compete with other workers.
        # Worker processes inherit the setting.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._job = job
        self._eod = job.tokenizer.eod if job.append_eod else None

    def __call__(self, block: Block) -> EncodedBlock:
        """Encode the block's records; bad ones are reported in the result, not raised."""
        columns, found = parse_records(block.records, self._job.keys, stop=self._job.stop)
        bad = [(error.reason, error.message) for error in found]
        if bad and self._job.stop:
            return EncodedBlock({}, bad)
        texts = {
            key: self._encode(column) for key, column in zip(self._job.keys, columns, strict=True)
        }
        return EncodedBlock(texts, bad)

    def _encode(self, texts: Sequence[str]) -> EncodedTexts:
        parts, parts_of = list(texts), np.ones(len(texts), np.int64)
        if self._job.split_sentences:
            pieces = [split_sentences(text) for text in texts]
            parts = [part for parts in pieces for part in parts]
            parts_of = np.fromiter(map(len, pieces), np.int64, len(pieces))
        # One call for the whole block and one array at its end: short documents come in millions,
        # and Python's own work on each must stay small beside the tokenizer's.
        encoded = self._job.tokenizer.encode_batch(parts)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        tokens = np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum()))

        # Sequences without a token go, and with them documents that have no other.
        document_of = np.repeat(np.arange(len(texts)), parts_of)
        documents = np.bincount(document_of[lengths > 0], minlength=len(texts))
        lengths, documents = lengths[lengths > 0], documents[documents > 0]
        if self._eod is not None:
            last = np.cumsum(documents) - 1  # each document's last sequence
            tokens = np.insert(tokens, np.cumsum(lengths)[last], self._eod)
            lengths[last] += 1
        return EncodedTexts(tokens, lengths, documents, len(texts) - documents.size)


def encode_blocks(
    blocks: Iterable[Block], job: EncodeJob, workers: int
) -> Iterator[tuple[Block, EncodedBlock]]:
    """Encode blocks with ``workers`` processes; results come in the order of the blocks.

    One worker means this process. A bounded number of blocks is held at a time.

    Raises:
        DataError: a worker process died.
    """
    encoder = Encoder(job)
    if workers == 1:
        for block in blocks:
            yield block, encoder(block)
        return
    try:
        yield from process_map(encoder, blocks, workers)
    except WorkerDiedError as error:
        where = f"near {error.item.records[0].where}" if error.item else "while starting"
        raise DataError(
            f"a worker process died {where}; the usual cause is too little memory: lower --workers "
            f"(now {workers}). (A script that calls preprocess with several workers must do so "
            "under `if __name__ == '__main__':`)"
        ) from error
