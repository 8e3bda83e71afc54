"""From text to Megatron's indexed datasets: ``python -m jaxtron.data preprocess``.

Each JSON key becomes a dataset of its own, named as Megatron names it:
``{prefix}_{key}_document``, or ``{prefix}_{key}_sentence`` with sentence splitting. Nothing appears
under these names until all input has been read without error.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
from tqdm import tqdm

from jaxtron.data.documents import Source, find_sources, read_blocks, total_bytes
from jaxtron.data.encoding import EncodedBlock, EncodeJob, encode_blocks
from jaxtron.data.indexed import IndexedDatasetWriter, bin_path, idx_path, optimal_dtype
from jaxtron.data.tokenizers import load_tokenizer
from jaxtron.errors import ConfigError, DataError

_SHOWN_BAD_RECORDS = 10


@dataclass
class Written:
    """What went into one dataset.

    Attributes:
        prefix: of the ``.bin``/``.idx`` pair.
        dtype: name of the stored type.
        documents, sequences, tokens: how many.
        skipped_empty: documents that gave no token and were left out.
    """

    prefix: str
    dtype: str
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    skipped_empty: int = 0


@dataclass
class Summary:
    """Outcome of :func:`preprocess`.

    Attributes:
        datasets: what was written, by JSON key.
        bad_records: skipped malformed records by reason.
        text_bytes: bytes of the records read, uncompressed.
        seconds: wall time.
    """

    datasets: dict[str, Written]
    bad_records: Counter[str] = field(default_factory=Counter)
    text_bytes: int = 0
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """The summary for people and scripts: one line per dataset, one with the speed."""
        bad = f"bad_records={self.bad_records.total()}"
        bad += "".join(f" {reason}={n}" for reason, n in sorted(self.bad_records.items()))
        lines = [
            f"{d.prefix}: documents={d.documents} sequences={d.sequences} tokens={d.tokens} "
            f"dtype={d.dtype} skipped_empty={d.skipped_empty} {bad}"
            for d in self.datasets.values()
        ]
        documents = max(d.documents for d in self.datasets.values())
        seconds = max(self.seconds, 1e-9)
        lines.append(
            f"{self.seconds:.1f} s, {documents / seconds:.0f} documents/s, "
            f"{self.text_bytes / 1e6 / seconds:.2f} MB/s"
        )
        return lines


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: str,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    eod_token: str | None = None,
    split_sentences: bool = False,
    suffixes: Sequence[str] = (".txt",),
    workers: int = 1,
    on_error: Literal["stop", "skip"] = "stop",
    overwrite: bool = False,
    progress: bool = False,
) -> Summary:
    """Tokenize documents into one indexed dataset per JSON key.

    A document without tokens is left out and counted; white space is text and is kept. With several
    keys each dataset leaves out its own empty documents. The output bytes do not depend on
    ``workers``, and memory does not grow with the number of documents (but for their index).

    Args:
        inputs: JSON Lines files (plain, gzip, Zstandard) and folders of text files, in this order.
        output_prefix: datasets are named ``{output_prefix}_{key}_document`` (or ``_sentence``).
        tokenizer: spec for :func:`~jaxtron.data.tokenizers.load_tokenizer`.
        json_keys: keys that hold text; a folder's files count as the only key.
        append_eod: end each document with the tokenizer's end-of-document id.
        eod_token: that token, in place of the one the tokenizer's files name.
        split_sentences: store each sentence as a sequence (see ``sentences.py``).
        suffixes: endings of the files to take from folders.
        workers: processes that tokenize.
        on_error: what a malformed record does: stop with an error, or be skipped and counted.
        overwrite: replace existing outputs.
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: options that cannot work together, an output that exists, a tokenizer without
            end of document where one is to be appended. Raised before any data is read.
        DataError: missing input, malformed record (with file and line), a key without any text, or
            a worker that died. No output is left, and an older one stays as it was.
    """
    started = time.monotonic()
    keys = _checked_keys(json_keys)
    if workers < 1:
        raise ConfigError(f"--workers {workers}: at least one process has to do the work")
    if on_error not in ("stop", "skip"):
        raise ConfigError(f"--on-error '{on_error}': choose stop or skip")
    sources = find_sources(inputs, suffixes)
    if len(keys) > 1 and any(source.whole for source in sources):
        raise ConfigError(
            f"--json-keys {' '.join(keys)}: a folder of text files has one text per document; "
            "give one key, or JSON Lines files only"
        )
    loaded = load_tokenizer(tokenizer, eod_token)
    if append_eod and loaded.eod is None:
        raise ConfigError(
            f"--append-eod: tokenizer {tokenizer} defines no end-of-document token; "
            "name one of its tokens with --eod-token, or leave --append-eod out"
        )
    dtype = optimal_dtype(loaded.vocab_size)
    level = "sentence" if split_sentences else "document"
    summary = Summary({key: Written(f"{output_prefix}_{key}_{level}", dtype.name) for key in keys})
    for written in summary.datasets.values():
        check_output(written.prefix, overwrite)

    job = EncodeJob(loaded, keys, append_eod, split_sentences, stop=on_error == "stop")
    try:
        _write(sources, job, summary, dtype, workers, progress)
    except OSError as error:  # reading raises DataError, so this is about writing
        raise DataError(f"writing {output_prefix}_* failed: {error}") from error
    summary.seconds = time.monotonic() - started
    return summary


def _write(
    sources: Sequence[Source],
    job: EncodeJob,
    summary: Summary,
    dtype: np.dtype,
    workers: int,
    progress: bool,
) -> None:
    """Encode all sources into the datasets that ``summary`` names, and count."""
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(IndexedDatasetWriter(written.prefix, dtype))
            for key, written in summary.datasets.items()
        }
        bar = stack.enter_context(_progress_bar(total_bytes(sources), progress))
        for block, encoded in encode_blocks(read_blocks(sources), job, workers):
            _note_bad(encoded, summary, bar, stop=job.stop)
            for key, texts in encoded.texts.items():
                written = summary.datasets[key]
                writers[key].add_documents(
                    texts.tokens, texts.sequence_lengths, texts.document_lengths
                )
                written.documents += texts.document_lengths.size
                written.sequences += texts.sequence_lengths.size
                written.tokens += texts.tokens.size
                written.skipped_empty += texts.skipped_empty
            summary.text_bytes += sum(len(record.data) for record in block.records)
            _advance(bar, block.position, max(d.documents for d in summary.datasets.values()))
        for key, written in summary.datasets.items():
            if not written.documents:
                raise DataError(
                    f"no document with text under key '{key}' in the input "
                    f"(skipped_empty={written.skipped_empty}, "
                    f"bad_records={summary.bad_records.total()}); nothing was written"
                )


def check_output(prefix: str | Path, overwrite: bool) -> None:
    """Refuse to replace an existing dataset unless told to.

    Raises:
        ConfigError: ``prefix`` has a ``.bin`` or ``.idx`` and ``overwrite`` is false.
    """
    for path in (bin_path(prefix), idx_path(prefix)):
        if path.exists() and not overwrite:
            raise ConfigError(
                f"output {path} exists already: choose another --output-prefix, or replace it "
                "with --overwrite"
            )


def _checked_keys(json_keys: Sequence[str]) -> tuple[str, ...]:
    keys = tuple(json_keys)
    if not keys or len(set(keys)) != len(keys) or not all(keys):
        raise ConfigError(f"--json-keys {list(keys)}: give one or more different keys")
    for key in keys:
        if os.sep in key:
            raise ConfigError(
                f"--json-keys '{key}': a key is part of the output's file name and cannot hold "
                f"'{os.sep}'"
            )
    return keys


def _note_bad(
    encoded: EncodedBlock, summary: Summary, bar: "tqdm[NoReturn]", *, stop: bool
) -> None:
    for reason, message in encoded.bad:
        if stop:
            raise DataError(f"{message}; --on-error skip leaves such records out and counts them")
        summary.bad_records[reason] += 1
        shown = summary.bad_records.total()
        # Through the bar only where it is drawn in place: elsewhere it would draw itself anew.
        note = bar.write if sys.stderr.isatty() else print
        if shown <= _SHOWN_BAD_RECORDS:
            note(f"skipped: {message}", file=sys.stderr)
        elif shown == _SHOWN_BAD_RECORDS + 1:
            note("skipped: more; from here on they are only counted", file=sys.stderr)


def _progress_bar(total: int, shown: bool) -> "tqdm[NoReturn]":
    # In a log file a line every half minute is enough, and none for a short job.
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="preprocess",
        disable=not shown,
        mininterval=interval,
        delay=0.0 if sys.stderr.isatty() else interval,
    )


def _advance(bar: "tqdm[NoReturn]", position: int, documents: int) -> None:
    elapsed = bar.format_dict["elapsed"] if not bar.disable else 0
    if elapsed:
        bar.set_postfix_str(f"{documents / elapsed:.0f} documents/s", refresh=False)
        bar.update(position - bar.n)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="JSON Lines files (plain, gzip or Zstandard), or folders whose text files are one "
        "document each, in the order of their paths",
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="write PREFIX_KEY_document.bin and .idx for every key (PREFIX_KEY_sentence with "
        "--split-sentences)",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="SPEC",
        help="'byte', a tokenizer.json, a folder holding one, or a SentencePiece *.model",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys that hold text, a dataset each (default: text); each dataset leaves out its own "
        "empty documents",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end every document with the end-of-document id"
    )
    parser.add_argument(
        "--eod-token", metavar="TOKEN", help="that token, if not the one the tokenizer names"
    )
    parser.add_argument(
        "--split-sentences",
        action="store_true",
        help="one sequence per sentence: ends at . ! ? before a word not in lower case (known "
        "abbreviations excepted), at CJK full stops and at empty lines",
    )
    parser.add_argument(
        "--suffixes",
        nargs="+",
        default=[".txt"],
        metavar="SUFFIX",
        help="endings of the files to take from folders (default: .txt)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that tokenize; the output is the same for any number (default: the cores "
        "of this machine, %(default)s)",
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="a malformed line stops with its file and line number (default), or is skipped and "
        "counted by reason",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing outputs")


def run(args: argparse.Namespace) -> int:
    """Run the command and print its summary."""
    summary = preprocess(
        args.input,
        args.output_prefix,
        args.tokenizer,
        json_keys=args.json_keys,
        append_eod=args.append_eod,
        eod_token=args.eod_token,
        split_sentences=args.split_sentences,
        suffixes=args.suffixes,
        workers=args.workers,
        on_error=args.on_error,
        overwrite=args.overwrite,
        progress=True,
    )
    print("\n".join(summary.lines()))
    return 0
