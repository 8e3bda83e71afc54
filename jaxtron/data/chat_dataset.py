"""Rows of whole conversations or documents, packed, for supervised fine-tuning."""

import logging
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from jaxtron.data.blend import Entry
from jaxtron.data.chat import ChatTemplate, Tokens, chat_template, encode, read_conversations
from jaxtron.data.config import DataConfig
from jaxtron.data.documents import Source, find_sources
from jaxtron.data.masks import Row
from jaxtron.data.packing import PACKINGS, packed_row
from jaxtron.data.source import RowDataset
from jaxtron.data.split import SPLIT_NAMES, Span, how_to_do_without, parse_split, split_spans
from jaxtron.data.tokenizers import Tokenizer, load_tokenizer
from jaxtron.errors import ConfigError, DataError

_log = logging.getLogger(__name__)


class ChatDataset:
    """Random access to packed rows, epoch after epoch.

    An epoch's documents are shuffled, packed, and the rows shuffled; all of it is a function of
    (seed, epoch), so any process finds any row by itself. Documents stay whole and in memory.

    Args:
        name: for messages.
        documents: token ids and what is trained, each of 2 to ``seq_length + 1`` tokens.
        seq_length: tokens of a row.
        packing: a key of ``PACKINGS``.
        num_samples: rows wanted; None: each document once, in order.
        seed: of the shuffles, below 2^32.
        arrays: names of the optional arrays that rows carry.
    """

    def __init__(
        self,
        name: str,
        documents: Sequence[Tokens],
        *,
        seq_length: int,
        packing: str,
        num_samples: int | None,
        seed: int,
        arrays: Sequence[str],
    ) -> None:
        self.name = name
        self._documents = documents
        self._seq_length = seq_length
        self._pack = PACKINGS[packing]
        self._left_out = {"position_ids", "segment_ids"} - set(arrays)
        self._rows: list[list[int]] = []
        for rows in self._epochs(seed, shuffle=num_samples is not None):
            self._rows += rows
            if num_samples is None or len(self._rows) >= num_samples:
                break

    def _epochs(self, seed: int, *, shuffle: bool) -> Iterator[list[list[int]]]:
        epoch = 0
        while True:
            order = np.arange(len(self._documents))
            # RandomState and not Generator: its streams are the same in every version of NumPy.
            rng = np.random.RandomState([seed, epoch])
            if shuffle:
                rng.shuffle(order)
            numbers: list[int] = order.tolist()
            lengths = [len(self._documents[d][0]) - 1 for d in numbers]
            rows = [[numbers[i] for i in row] for row in self._pack(lengths, self._seq_length)]
            if shuffle:
                rows = [rows[i] for i in rng.permutation(len(rows))]
            yield rows
            epoch += 1

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        """Row ``index``; see :func:`jaxtron.data.packing.packed_row`."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.name}")
        row = packed_row([self._documents[d] for d in self._rows[index]], self._seq_length)
        return {name: array for name, array in row.items() if name not in self._left_out}

    def provenance(self, index: int) -> tuple[int, ...]:
        """Numbers of the documents that row ``index`` is made of, and CRC-32 of their tokens."""
        documents = self._rows[index]
        return (*documents, *(_digest(self._documents[d]) for d in documents))

    def fingerprints(self) -> list[int]:
        """Of all documents, wherever their files lie: CRC-32 of their tokens and loss masks."""
        digest = 0
        for document in self._documents:
            digest = _digest(document, digest)
        return [digest]


def _digest(document: Tokens, start: int = 0) -> int:
    tokens, trained = document
    return zlib.crc32(trained.tobytes(), zlib.crc32(tokens.tobytes(), start))


class ChatBuilder:
    """Builds splits from JSON Lines files of conversations, each file read once.

    Raises:
        ConfigError: keys that contradict each other, or name no files or no tokenizer.
    """

    def __init__(self, config: DataConfig, vocab_size: int, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._own_paths = {name: getattr(config, f"{name}_paths") for name in SPLIT_NAMES}
        if bool(config.paths) == any(self._own_paths.values()):
            raise ConfigError(
                "data.source chat needs JSON Lines files in data.paths (shared out by data.split) "
                "or in data.train_paths / valid_paths / test_paths, one or the other"
            )
        switches = ("reset_attention_mask", "reset_position_ids")
        off = [f"data.{name}" for name in switches if not getattr(config, name)]
        if config.packing != "none" and off:
            raise ConfigError(
                f"data.packing {config.packing} puts several documents in a row, which must not "
                f"see each other: set {' and '.join(off)} to true, or data.packing to none"
            )
        if config.eod_mask_loss:
            raise ConfigError(
                "data.eod_mask_loss: in data.source chat the roles say what is trained; set it to "
                "false"
            )
        if config.tokenizer is None:
            raise ConfigError("data.source chat makes tokens of text: set data.tokenizer")
        self._tokenizer = load_tokenizer(config.tokenizer)
        if self._tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"data.tokenizer {config.tokenizer} has {self._tokenizer.vocab_size} ids, but "
                f"model.vocab_size is {vocab_size}; set it to at least {self._tokenizer.vocab_size}"
            )
        self._template = chat_template(config.chat_template)
        self._weights = parse_split(config.split)
        self._shared = self._read(config.paths, "data.paths") if config.paths else []

    def build(self, split: str, num_samples: int | None) -> RowDataset | None:
        """One split with at least ``num_samples`` rows; None: every document once.

        Returns:
            The dataset; None for a split of ``data.paths`` without a share.

        Raises:
            DataError: a file is missing or damaged, or the split has no document.
        """
        where = "data.paths" if self._config.paths else f"data.{split}_paths"
        if self._config.paths:
            span: Span = split_spans(self._weights, len(self._shared))[SPLIT_NAMES.index(split)]
            documents = self._shared[span.start : span.stop]
            if not documents and self._weights[SPLIT_NAMES.index(split)] == 0 and split == "valid":
                _log.warning(
                    "data.split %r has no %s share: it is skipped", self._config.split, split
                )
                return None
        else:
            documents = self._read(self._own_paths[split], where)
        if not documents:
            raise DataError(
                f"{where} holds no document for the {split} split{how_to_do_without(split)}"
            )
        switches = {
            "position_ids": self._config.reset_position_ids,
            "segment_ids": self._config.reset_attention_mask,
        }
        return ChatDataset(
            f"{', '.join(map(str, self._config.paths or self._own_paths[split]))} ({split})",
            documents,
            seq_length=self._config.seq_length,
            packing=self._config.packing,
            num_samples=num_samples,
            seed=self._seed,
            arrays=[name for name, on in switches.items() if on],
        )

    def _read(self, paths: Sequence[Entry], key: str) -> list[Tokens]:
        if not paths:
            return []
        weights = [path for path in paths if not isinstance(path, str)]
        if weights:
            raise ConfigError(f"{key} holds {weights[0]}: data.source chat takes files, no blend")
        sources = find_sources([str(path) for path in paths])
        return read_documents(
            sources,
            self._template,
            self._tokenizer,
            seq_length=self._config.seq_length,
            overlong=self._config.overlong,
        )


def read_documents(
    sources: Sequence[Source],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    overlong: str,
) -> list[Tokens]:
    """Every conversation and document of some files, as tokens, in order.

    Args:
        sources: JSON Lines files.
        template: text around messages.
        tokenizer: of the run.
        seq_length: a document may have one token more; its last is only a label.
        overlong: what happens to a longer one: ``error``, ``truncate`` (its end is cut off) or
            ``drop``.

    Raises:
        DataError: a file is missing, a record is malformed, or a document is too long under
            ``error``; with file and line.
    """
    documents: list[Tokens] = []
    cut = empty = 0
    for record, conversation in read_conversations(sources):
        tokens, trained = encode(conversation, template, tokenizer)
        if len(tokens) > seq_length + 1:
            if overlong == "error":
                raise DataError(
                    f"{record.where}: {len(tokens)} tokens do not fit a row of data.seq_length "
                    f"{seq_length}; set data.seq_length to at least {len(tokens) - 1}, or "
                    "data.overlong to truncate or drop"
                )
            cut += 1
            if overlong == "drop":
                continue
            tokens, trained = tokens[: seq_length + 1], trained[: seq_length + 1]
        if not trained[1:].any():
            empty += 1
            continue
        documents.append((tokens, trained))
    names = ", ".join(str(source.path) for source in sources)
    if cut:
        done = {"drop": "left out", "truncate": "cut"}[overlong]
        _log.warning("%s: %d documents longer than data.seq_length were %s", names, cut, done)
    if empty:
        _log.warning("%s: %d documents without a token to train on were left out", names, empty)
    return documents
