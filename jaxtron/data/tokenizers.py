"""Tokenizers: text to token ids and back.

Three kinds, chosen by the form of one string, the ``spec``:

- ``byte``: the UTF-8 bytes themselves, ids 0-255, and 256 for the end of a document;
- a Hugging Face ``tokenizer.json``, or a folder that holds one;
- a SentencePiece ``*.model`` file (needs the optional package ``sentencepiece``).

No tokenizer here adds special tokens of its own accord (no BOS, no template, no truncation, no
padding): what surrounds a document is decided by the program that writes the dataset.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers as hf

from jaxtron.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"

_WELL_KNOWN_EOD = (END_OF_TEXT, "</s>", "<eos>")
_SPECS = "'byte', a tokenizer.json, a folder holding one, or a SentencePiece *.model file"


class Tokenizer(ABC):
    """What the rest of jaxtron needs of a tokenizer.

    Attributes:
        name: the spec it was loaded from.
        vocab_size: largest id + 1; every id is below it, whether or not all ids are in use.
        eod: id that ends a document, or None when the tokenizer defines none.
        pad: id of padding as the tokenizer's files name it, or None; never guessed.
    """

    name: str
    vocab_size: int
    eod: int | None
    pad: int | None

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; lone surrogates count as U+FFFD."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, in one call of the library."""
        try:
            "".join(texts).encode()  # of short texts, faster than each by itself
        except UnicodeEncodeError:
            texts = [replace_surrogates(text) for text in texts]
        return self._encode(list(texts))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, special tokens included; bytes that are not UTF-8 become U+FFFD.

        Raises:
            DataError: an id outside ``[0, vocab_size)``.
        """
        checked = [int(token) for token in ids]
        for token in checked:
            if not 0 <= token < self.vocab_size:
                raise DataError(
                    f"token id {token} is outside the vocabulary of tokenizer {self.name}, "
                    f"0 to {self.vocab_size - 1}"
                )
        return self._decode(checked)

    @abstractmethod
    def _encode(self, texts: list[str]) -> list[list[int]]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


def load_tokenizer(spec: str | Path, eod_token: str | None = None) -> Tokenizer:
    """Load the tokenizer that ``spec`` names.

    Args:
        spec: ``byte``, a ``tokenizer.json``, a folder that holds one (or a ``tokenizer.model``),
            or a SentencePiece ``*.model``.
        eod_token: the token that ends a document, in place of the one that the tokenizer's
            files name.

    Raises:
        DataError: the file is missing or unreadable, or names tokens it does not have.
        ConfigError: a needed package is not installed, or ``eod_token`` is not in the vocabulary.
    """
    spec = str(spec)
    if spec == "byte":
        return ByteTokenizer(eod_token)
    path = Path(spec)
    if path.is_dir():
        for name in ("tokenizer.json", "tokenizer.model"):
            if (path / name).is_file():
                path = path / name
                break
        else:
            raise DataError(
                f"tokenizer folder {spec} holds neither tokenizer.json nor tokenizer.model"
            )
    if not path.is_file():
        raise DataError(f"no tokenizer at '{spec}': give {_SPECS}")
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, eod_token, name=spec)
    return HuggingFaceTokenizer(path, eod_token, name=spec)


def replace_surrogates(text: str) -> str:
    """``text`` with every lone surrogate (no UTF-8 form) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)
    return text


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as tokens: ids 0-255, end of document 256, no padding id."""

    def __init__(self, eod_token: str | None = None) -> None:
        if eod_token not in (None, END_OF_TEXT):
            raise ConfigError(
                f"--eod-token '{eod_token}': the byte tokenizer's only special token is "
                f"{END_OF_TEXT} (id 256)"
            )
        self.name = "byte"
        self.vocab_size = 257
        self.eod = 256
        self.pad = None

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        pieces = bytearray()
        for token in ids:
            pieces += END_OF_TEXT.encode() if token == 256 else bytes((token,))
        return pieces.decode(errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` of the ``tokenizers`` library.

    Special tokens written out in the text are encoded as such, as that library does by default.
    """

    def __init__(self, path: Path, eod_token: str | None, *, name: str) -> None:
        try:
            self._tokenizer = hf.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a damaged file
            raise DataError(f"{path} is not a readable tokenizer.json: {error}") from error
        # Some published files cut every text at 512 tokens or pad it; a dataset wants it whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise DataError(f"{path} has an empty vocabulary")
        self.name = name
        self.vocab_size = max(vocab.values()) + 1
        named = _special_tokens(path.parent)
        self.eod = _eod_id(vocab, eod_token, named, path)
        self.pad = _named_id(vocab, "pad_token", named, path)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # "fast" leaves out character offsets, which nobody here reads.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; its eos and pad pieces are ``eod`` and ``pad`` where defined."""

    def __init__(self, path: Path, eod_token: str | None, *, name: str) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise ConfigError(
                f"tokenizer {path} needs the package sentencepiece: pip install sentencepiece"
            ) from error
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path} is not a readable SentencePiece model: {error}") from error
        self.name = name
        self.vocab_size = int(self._model.vocab_size())
        self.eod = _defined(self._model.eos_id())
        self.pad = _defined(self._model.pad_id())
        if eod_token is not None:
            self.eod = int(self._model.piece_to_id(eod_token))
            # An unknown piece maps to the id of <unk>, so compare on the way back.
            if self._model.id_to_piece(self.eod) != eod_token:
                raise ConfigError(f"--eod-token '{eod_token}' is not a piece of {path}")

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # One thread: the caller decides how many processes run.
        return list(self._model.encode(texts, num_threads=1))

    def _decode(self, ids: list[int]) -> str:
        return str(self._model.decode(ids))


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer and write it; the same texts give the same file.

    Id 0 is ``<|endoftext|>``, ids 1-256 are the bytes, the rest are merges. A corpus with too few
    repeated pairs gives fewer entries than asked: look at ``vocab_size`` of the result.

    Args:
        texts: documents; read once.
        vocab_size: entries wanted, at least 257.
        path: a ``*.json`` file, or a folder, made if absent, that receives ``tokenizer.json`` and
            ``tokenizer_config.json`` (which names the end of document for other libraries).

    Returns:
        The trained tokenizer, loaded from ``path``.

    Raises:
        ConfigError: ``vocab_size`` below 257.
        DataError: ``texts`` holds no text at all.
    """
    if vocab_size < 257:
        raise ConfigError(
            f"vocab_size {vocab_size}: a byte-level tokenizer has at least 257 entries "
            f"(256 bytes and {END_OF_TEXT})"
        )
    characters = 0

    def counted() -> Iterable[str]:
        nonlocal characters
        for text in texts:
            characters += len(text)
            yield replace_surrogates(text)

    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(counted(), trainer)
    if not characters:
        raise DataError("no text to train a tokenizer on: every document is empty")
    path = Path(path)
    file = path
    if path.suffix != ".json":
        path.mkdir(parents=True, exist_ok=True)
        file = path / "tokenizer.json"
        settings = {"eos_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
        (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(file))
    return load_tokenizer(path)


def _defined(token: int) -> int | None:
    """SentencePiece says -1 for a piece that the model does not have."""
    return token if token >= 0 else None


def _special_tokens(folder: Path) -> dict[str, tuple[str, Path]]:
    """eos and pad tokens that the files beside a tokenizer.json name: key -> (token, file)."""
    named: dict[str, tuple[str, Path]] = {}
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if not file.is_file():
            continue
        try:
            settings: Any = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(settings, dict):
            raise DataError(f"{file} should hold one JSON object, found {type(settings).__name__}")
        for key in ("eos_token", "pad_token"):
            token = settings.get(key)
            if isinstance(token, dict):  # an added token with its flags
                token = token.get("content")
            if isinstance(token, str) and key not in named:
                named[key] = (token, file)
    return named


def _named_id(
    vocab: dict[str, int], key: str, named: dict[str, tuple[str, Path]], path: Path
) -> int | None:
    if key not in named:
        return None
    token, file = named[key]
    if token not in vocab:
        raise DataError(f"{file} names {key} '{token}', which is not in the vocabulary of {path}")
    return vocab[token]


def _eod_id(
    vocab: dict[str, int], override: str | None, named: dict[str, tuple[str, Path]], path: Path
) -> int | None:
    if override is not None:
        if override not in vocab:
            raise ConfigError(f"--eod-token '{override}' is not in the vocabulary of {path}")
        return vocab[override]
    if "eos_token" in named:
        return _named_id(vocab, "eos_token", named, path)
    return next((vocab[token] for token in _WELL_KNOWN_EOD if token in vocab), None)
