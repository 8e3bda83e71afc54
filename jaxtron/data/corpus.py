"""Collecting real text from this machine, for the quickstart and for tests without a network."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtron.data.documents import read_texts, text_files
from jaxtron.errors import ConfigError, DataError

_SKIPPED_FOLDERS = frozenset(("site-packages", "test", "tests", "idle_test", "__pycache__"))


@dataclass(frozen=True)
class Corpus:
    """What :func:`write_corpus` collected: ``text_bytes`` counts UTF-8 text, not the JSON."""

    path: Path
    documents: int
    text_bytes: int


def standard_library() -> Path:
    """The folder with the source files of Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def write_corpus(
    out_jsonl: str | Path,
    sources: Sequence[str | Path] = (),
    *,
    max_bytes: int = 16 << 20,
    suffixes: Sequence[str] = (".txt", ".md", ".rst", ".py"),
    json_key: str = "text",
) -> Corpus:
    """Write documents from ``sources`` as JSON Lines, one ``{"text": …}`` per line.

    Documents are taken and written in the order of a hash of their name (a folder's files) or text,
    so the same sources give the same file, every source is spread over it, and any contiguous split
    of its documents (``data.split``) is a fair one. All of it is held in memory.

    Args:
        out_jsonl: file to write; its folder is made if absent.
        sources: folders of text files and JSON Lines files; none means the ``*.py`` files of
            Python's standard library. Folders of tests and installed packages are left out.
        max_bytes: limit of the text [bytes of UTF-8]; sources share it equally. Of a folder, the
            files that come first by hash are taken, of a JSON Lines file the first records.
            Documents that do not fit in what is left are passed over, never cut.
        suffixes: endings of the files to take from folders.
        json_key: key of the text in JSON Lines sources.

    Raises:
        DataError: a source is missing, malformed, or gives no text.
        ConfigError: ``max_bytes`` is not positive.
    """
    if max_bytes < 1:
        raise ConfigError(f"max_bytes {max_bytes}: give a positive number of bytes")
    chosen = [Path(source) for source in sources]
    if not chosen:
        chosen, suffixes = [standard_library()], (".py",)
    budget = max_bytes // len(chosen)
    documents: list[str] = []
    for source in chosen:
        if source.is_dir():
            texts = _folder_texts(source, suffixes)
        else:
            texts = read_texts([source], json_key)
        taken = _within(texts, budget)
        if not taken:
            raise DataError(
                f"{source} gives no document of at most {budget} bytes (files ending in "
                f"{' or '.join(suffixes)} if it is a folder)"
            )
        documents += taken
    documents.sort(key=_digest)
    out = Path(out_jsonl)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text}) + "\n")
    return Corpus(out, len(documents), sum(_size(text) for text in documents))


def _folder_texts(folder: Path, suffixes: Sequence[str]) -> Iterator[str]:
    paths = text_files(folder, suffixes, _SKIPPED_FOLDERS)
    for path in sorted(paths, key=lambda p: _digest(p.relative_to(folder).as_posix())):
        # A folder on a person's machine may hold a file in an old encoding: not text for us.
        try:
            yield path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            continue


def _within(texts: Iterator[str], budget: int) -> list[str]:
    """Non-empty texts in order that fit in ``budget`` bytes together, until it is nearly full."""
    taken: list[str] = []
    left = budget
    for text in texts:
        size = _size(text)
        if size <= left and text.strip():
            taken.append(text)
            left -= size
        if left * 64 < budget:
            break
    return taken


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
