"""Reading text documents: JSON Lines files (plain, gzip, Zstandard) and folders of text files."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxtron.data.compression import open_decompressed
from jaxtron.data.remote import RemoteFile, is_remote
from jaxtron.errors import ConfigError, DataError

_BOM = b"\xef\xbb\xbf"

_parse_json = json.JSONDecoder().decode
# The same in C: no white space around, and StopIteration where there is no value.
_scan_json = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

BLOCK_BYTES = 1 << 20
BLOCK_RECORDS = 1000


class Source(NamedTuple):
    """One input file; ``whole`` when all of it is one document, else one JSON object per line."""

    path: Path | RemoteFile
    whole: bool


class Record(NamedTuple):
    """The raw bytes of one document; ``line`` counts from 1, and is 0 for a whole file."""

    path: str
    line: int
    data: bytes

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return f"{self.path} line {self.line}" if self.line else self.path


class Block(NamedTuple):
    """Consecutive records: the unit of work, about ``BLOCK_BYTES`` of text.

    ``position`` is how far reading has come after it [bytes on disk, over all sources].
    """

    records: list[Record]
    position: int


class BadRecord(Exception):
    """A record that holds no document.

    Attributes:
        reason: one of ``not_utf8``, ``bad_json``, ``not_an_object``, ``missing_key``,
            ``not_a_string``.
        message: file, line and reason in words.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def find_sources(inputs: Sequence[str | Path], suffixes: Sequence[str] = (".txt",)) -> list[Source]:
    """Resolve inputs: a file is JSON Lines; a folder gives each file with a suffix as a document.

    A URL is one JSON Lines file, read through fsspec.

    Files of a folder come in the order of their paths below it, whatever the file system says.

    Raises:
        DataError: an input does not exist, or a folder has no such file.
        ConfigError: no input, or no suffix for a folder.
    """
    if not inputs:
        raise ConfigError("no input: give at least one JSON Lines file or folder of text files")
    sources = []
    for given in inputs:
        if is_remote(str(given)):
            file = RemoteFile(str(given))
            if not file.is_file():
                raise DataError(f"input {given} does not exist or is no file")
            sources.append(Source(file, whole=False))
            continue
        path = Path(given)
        if path.is_dir():
            files = text_files(path, suffixes)
            if not files:
                raise DataError(
                    f"folder {path} has no file ending in {' or '.join(suffixes)}; "
                    "choose others with --suffixes, or give JSON Lines files by name"
                )
            sources += [Source(text, whole=True) for text in files]
        elif path.exists():
            sources.append(Source(path, whole=False))
        else:
            raise DataError(f"input {path} does not exist")
    return sources


def text_files(folder: Path, suffixes: Sequence[str], skipped: Collection[str] = ()) -> list[Path]:
    """Files below ``folder`` that end in one of ``suffixes``, ordered by path below it.

    Folders named in ``skipped`` are not entered.
    """
    if not suffixes or not all(suffixes):
        raise ConfigError(f"a folder of text files needs suffixes such as .txt, got {suffixes}")
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]
        found += [Path(parent, name) for name in names if name.endswith(tuple(suffixes))]
    return sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(folder).as_posix())


def total_bytes(sources: Iterable[Source]) -> int:
    """Size of all sources on disk."""
    return sum(
        path.size() if isinstance(path, RemoteFile) else path.stat().st_size for path, _ in sources
    )


def read_blocks(sources: Iterable[Source]) -> Iterator[Block]:
    """All records in order, in blocks. Blank lines are no records; a BOM before one is dropped.

    Raises:
        DataError: a file cannot be read or its compression is damaged.
    """
    records: list[Record] = []
    size = 0
    finished = 0
    new = tuple.__new__  # a third of the time that a named tuple's own constructor takes
    for path, whole in sources:
        name = str(path)
        with open_decompressed(path) as (stream, file):
            # The only line of a whole file is number 0.
            lines = enumerate([stream.read()] if whole else stream, start=0 if whole else 1)
            for number, data in lines:
                if data.startswith(_BOM):  # also within: files with BOMs may have been joined
                    data = data[len(_BOM) :]
                if number and (not data or data.isspace()):
                    continue
                records.append(new(Record, (name, number, data)))
                size += len(data)
                if size >= BLOCK_BYTES or len(records) >= BLOCK_RECORDS:
                    yield Block(records, finished + file.tell())
                    records, size = [], 0
            finished += file.seek(0, os.SEEK_END)
    if records:
        yield Block(records, finished)


def parse_records(
    records: Iterable[Record], keys: Sequence[str], *, stop: bool
) -> tuple[list[list[str]], list[BadRecord]]:
    """The texts under each of ``keys``, and the bad records, up to the first one with ``stop``."""
    columns: list[list[str]] = [[] for _ in keys]
    pairs = list(zip(keys, columns, strict=True))
    bad: list[BadRecord] = []
    for record in records:
        # Much of the work on short documents is here. Where this does not do (white space in
        # front, any error), the slower way says what is wrong.
        _, line, data = record
        if line:
            try:
                text = data.decode()
                value, end = _scan_json(text, 0)
                if text[end:] == "\n" and all(type(value[key]) is str for key in keys):
                    for key, column in pairs:
                        column.append(value[key])
                    continue
            except (StopIteration, ValueError, RecursionError, TypeError, KeyError):
                pass
        try:
            for found, column in zip(parse_record(record, keys), columns, strict=True):
                column.append(found)
        except BadRecord as error:
            bad.append(error)
            if stop:
                break
    return columns, bad


def parse_record(record: Record, keys: Sequence[str]) -> list[str]:
    """The text under each of ``keys``; a whole file is the text of its only key.

    Raises:
        BadRecord: the record is malformed.
    """
    if not record.line:
        return [_text(record)]
    value = parse_object(record)
    texts: list[Any] = [value.get(key) for key in keys]
    for key, found in zip(keys, texts, strict=True):
        if isinstance(found, str):
            continue
        if key not in value:
            present = ", ".join(f"'{name}'" for name in list(value)[:8]) or "none"
            raise BadRecord(
                "missing_key", f"{record.where}: key '{key}' missing (its keys: {present})"
            )
        raise BadRecord(
            "not_a_string",
            f"{record.where}: value of key '{key}' is not a string but {_json_type(found)}",
        )
    return texts


def parse_object(record: Record) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        BadRecord: it is none.
    """
    value = _decoded(record, _text(record))
    if not isinstance(value, dict):
        raise BadRecord(
            "not_an_object", f"{record.where}: not a JSON object but {_json_type(value)}"
        )
    return value


def _text(record: Record) -> str:
    try:
        return record.data.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(
            "not_utf8", f"{record.where}: not UTF-8 ({error.reason} at byte {error.start})"
        ) from None


def _decoded(record: Record, text: str) -> Any:
    """The JSON value of a line.

    Raises:
        BadRecord: it is none.
    """
    try:
        return _parse_json(text.rstrip("\r\n"))  # a string cut off ends before the line's end
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise BadRecord(
            "bad_json", f"{record.where}: bad JSON ({what} at character {error.pos + 1})"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, endless nesting
        raise BadRecord("bad_json", f"{record.where}: bad JSON ({error})") from None


def read_texts(
    inputs: Sequence[str | Path], key: str = "text", suffixes: Sequence[str] = (".txt",)
) -> Iterator[str]:
    """The text of every document of ``inputs``, in order.

    Raises:
        DataError: an input is missing or a record is malformed (file, line, reason).
    """
    for block in read_blocks(find_sources(inputs, suffixes)):
        [texts], bad = parse_records(block.records, (key,), stop=True)
        yield from texts
        if bad:
            raise DataError(bad[0].message)


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
