"""Turning blocks of records into token arrays, in this process or in several.

The result is a function of the records alone: blocks come back in the order in which they were
read, and a document's tokens depend on nothing but its text, so any number of workers gives the
same output.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.documents import BadRecord, Block, Record, parse_record
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

    def documents(self) -> Iterator[list[NDArray[np.int32]]]:
        """Each document as the list of its sequences."""
        ends = np.cumsum(self.sequence_lengths).tolist()
        sequence = start = 0
        for count in self.document_lengths.tolist():
            document = []
            for end in ends[sequence : sequence + count]:
                document.append(self.tokens[start:end])
                start = end
            sequence += count
            yield document


@dataclass(frozen=True)
class EncodedBlock:
    """A block's documents per key, and its bad records as (reason, message)."""

    texts: dict[str, EncodedTexts]
    bad: list[tuple[str, str]]


class Encoder:
    """Encodes records one block at a time."""

    def __init__(self, job: EncodeJob) -> None:
        # One process uses one core: the tokenizer's own threads would compete with other workers.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._job = job
        self._eod = np.array([job.tokenizer.eod], np.int32) if job.append_eod else None

    def __call__(self, records: Iterable[Record]) -> EncodedBlock:
        """Encode the records; bad ones are reported in the result, not raised."""
        rows: list[tuple[str, ...]] = []
        bad: list[tuple[str, str]] = []
        for record in records:
            try:
                rows.append(parse_record(record, self._job.keys))
            except BadRecord as error:
                bad.append((error.reason, error.message))
                if self._job.stop:
                    return EncodedBlock({}, bad)
        texts = {
            key: self._encode([row[column] for row in rows])
            for column, key in enumerate(self._job.keys)
        }
        return EncodedBlock(texts, bad)

    def _encode(self, texts: Sequence[str]) -> EncodedTexts:
        split = split_sentences if self._job.split_sentences else _whole
        pieces = [split(text) for text in texts]
        # One call for the whole block: the library's cost per call is that of many tokens.
        encoded = iter(self._job.tokenizer.encode_batch([part for p in pieces for part in p]))
        tokens: list[NDArray[np.int32]] = []
        sequence_lengths: list[int] = []
        document_lengths: list[int] = []
        for piece in pieces:
            sequences = [ids for ids in (next(encoded) for _ in piece) if ids.size]
            if not sequences:
                continue
            tokens += sequences
            sequence_lengths += [ids.size for ids in sequences]
            document_lengths.append(len(sequences))
            if self._eod is not None:
                tokens.append(self._eod)
                sequence_lengths[-1] += 1
        return EncodedTexts(
            np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            np.array(sequence_lengths, np.int64),
            np.array(document_lengths, np.int64),
            skipped_empty=len(texts) - len(document_lengths),
        )


def _whole(text: str) -> list[str]:
    return [text]


def encode_blocks(
    blocks: Iterable[Block], job: EncodeJob, workers: int
) -> Iterator[tuple[Block, EncodedBlock]]:
    """Encode blocks with ``workers`` processes; results come in the order of the blocks.

    One worker means this process. At most ``2 * workers + 2`` blocks are held at a time.

    Raises:
        DataError: a worker process died.
    """
    if workers == 1:
        encoder = Encoder(job)
        for block in blocks:
            yield block, encoder(block.records)
        return
    # "spawn": a fork of a process with threads (JAX's, the tokenizer's) can deadlock.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(job,)
    )
    pending: deque[tuple[Block, Future[EncodedBlock]]] = deque()

    def next_result() -> tuple[Block, EncodedBlock]:
        block, future = pending.popleft()
        try:
            return block, future.result()
        except BrokenProcessPool as error:
            raise _worker_died(block, workers) from error

    try:
        for block in blocks:
            try:
                pending.append((block, pool.submit(_encode_in_worker, block.records)))
            except (BrokenProcessPool, OSError) as error:  # submitting may start a worker
                raise _worker_died(block, workers) from error
            if len(pending) > 2 * workers + 1:
                yield next_result()
        while pending:
            yield next_result()
    finally:
        pool.shutdown(cancel_futures=True)


def _worker_died(block: Block, workers: int) -> DataError:
    return DataError(
        f"a worker process died or could not start, near {block.records[0].where}; the usual cause "
        f"is too little memory: lower --workers (now {workers}). (A script that calls preprocess "
        "with several workers must do so under `if __name__ == '__main__':`)"
    )


_encoder: Encoder  # of a worker process


def _start_worker(job: EncodeJob) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _encoder = Encoder(job)


def _encode_in_worker(records: list[Record]) -> EncodedBlock:
    return _encoder(records)
