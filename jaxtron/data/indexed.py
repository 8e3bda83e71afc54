"""Megatron's indexed dataset: `prefix.bin` (tokens) and `prefix.idx` (where each sequence is).

`prefix.bin` is the plain concatenation of all sequences. `prefix.idx`, little-endian and packed::

    bytes 0-8    magic "MMIDIDX\\0\\0"
    bytes 9-16   uint64 version, always 1
    byte  17     uint8  code of the token dtype (see `DTYPE_CODES`)
    bytes 18-25  uint64 N, number of sequences
    bytes 26-33  uint64 D, number of documents + 1
    int32[N]     sequence lengths                     [tokens]
    int64[N]     where each sequence starts in .bin   [bytes]
    int64[D]     number of the first sequence of each document; the last entry is N
    int8[N]      mode of each sequence (multimodal sets only)

Nothing in the header says whether the mode section is there; the size of the file does. The format
is that of Megatron-Core's `core/datasets/indexed_dataset.py`; sets written by either side can be
read by the other.
"""

import itertools
import mmap
import operator
import os
import shutil
import struct
import zlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jaxtron.data.remote import RemoteFile, RemoteTokens, is_remote
from jaxtron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")

DTYPE_CODES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODE_OF = {dtype: code for code, dtype in DTYPE_CODES.items()}

MAX_DOCUMENT_TOKENS = 2**31 - 1
_CHUNK = 1 << 20  # sequences per step of the checks at open, so that they need little memory


def optimal_dtype(vocab_size: int | None) -> np.dtype:
    """The token dtype Megatron stores for a vocabulary: uint16 below 65 500 ids, else int32."""
    if vocab_size is not None and vocab_size < 65500:
        return np.dtype("<u2")
    return np.dtype("<i4")


def sequence_pointers(lengths: Sequence[int] | NDArray, itemsize: int) -> NDArray[np.int64]:
    """Byte offset in `.bin` at which each sequence starts, `[sequences]`.

    Args:
        lengths: sequence lengths [tokens], of any integer type; the sum is made in 64 bits.
        itemsize: bytes per token.
    """
    sizes = np.asarray(lengths, dtype=np.int64) * itemsize
    return np.cumsum(sizes) - sizes


def bin_path(prefix: str | os.PathLike) -> Path:
    """The token file of the set with this prefix."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike) -> Path:
    """The index file of the set with this prefix."""
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset(Sequence[NDArray]):
    """Random access to the sequences of a `.bin/.idx` pair, memory-mapped.

    A prefix that is a URL is read through fsspec: the index at open, tokens in blocks on demand.

    Everything that the index claims is checked at open, so that a damaged or mismatched pair is
    refused before training starts and not at the first sequence past the damage.

    Attributes:
        prefix: path without `.bin` / `.idx`.
        dtype: type of the stored tokens.
        sequence_lengths: int32 `[sequences]` [tokens].
        sequence_pointers: int64 `[sequences]` [bytes].
        document_indices: int64 `[documents + 1]`, the first sequence of each document.
        sequence_modes: int8 `[sequences]`, or None when the set is not multimodal.

    Raises:
        DataError: a file is missing, or the pair is truncated, foreign or inconsistent.
    """

    def __init__(self, prefix: str | os.PathLike) -> None:
        self.prefix = os.fspath(prefix)
        idx: Path | RemoteFile = idx_path(prefix)
        bin_: Path | RemoteFile = bin_path(prefix)
        if is_remote(self.prefix):
            idx, bin_ = RemoteFile(f"{self.prefix}.idx"), RemoteFile(f"{self.prefix}.bin")
        for path in (idx, bin_):
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file; a dataset is named by its prefix, the common path "
                    "of its .bin and .idx files without the ending"
                )
        self._read_index(idx)
        self._check_index(idx)
        self._check_size_of_bin(idx, bin_)
        self._tokens: NDArray | RemoteTokens
        if isinstance(bin_, RemoteFile):
            self._tokens = RemoteTokens(bin_, self.dtype, self.num_tokens)
        else:
            self._tokens = np.frombuffer(_map(bin_), dtype=self.dtype)

    def _read_index(self, path: Path | RemoteFile) -> None:
        buffer = _map(path)
        if len(buffer) < _HEADER.size:
            raise DataError(
                f"{path}: {len(buffer)} bytes, but the header alone takes {_HEADER.size}; "
                "the file is truncated or is not a Megatron index"
            )
        magic, version, code, count, documents = _HEADER.unpack_from(buffer)
        if magic != MAGIC:
            raise DataError(
                f"{path}: starts with {magic!r}, not with {MAGIC!r}: not a Megatron index"
            )
        if version != VERSION:
            raise DataError(f"{path}: index version {version}; only version {VERSION} is known")
        if code not in DTYPE_CODES:
            known = ", ".join(f"{c} {d.name}" for c, d in DTYPE_CODES.items())
            raise DataError(f"{path}: unknown token dtype code {code}; known: {known}")
        plain = _HEADER.size + 12 * count + 8 * documents
        if len(buffer) not in (plain, plain + count):
            raise DataError(
                f"{path}: {len(buffer)} bytes, expected {plain} (or {plain + count} with modes) "
                f"for {count} sequences and {documents} document entries; "
                "the file is truncated or damaged"
            )
        self.dtype = DTYPE_CODES[code]
        at = _HEADER.size
        self.sequence_lengths: NDArray[np.int32] = np.frombuffer(buffer, "<i4", count, at)
        self.sequence_pointers: NDArray[np.int64] = np.frombuffer(
            buffer, "<i8", count, at + 4 * count
        )
        self.document_indices: NDArray[np.int64] = np.frombuffer(
            buffer, "<i8", documents, at + 12 * count
        )
        self.sequence_modes: NDArray[np.int8] | None = None
        if count and len(buffer) == plain + count:
            self.sequence_modes = np.frombuffer(buffer, "<i1", count, plain)

    def _check_index(self, path: Path | RemoteFile) -> None:
        count, documents = len(self), self.document_indices
        if documents.size == 0 or documents[0] != 0 or documents[-1] != count:
            ends = f"{documents[0]} to {documents[-1]}" if documents.size else "nothing"
            raise DataError(
                f"{path}: the document index runs from {ends}, expected 0 to {count} "
                "(the number of sequences)"
            )
        for start in range(0, documents.size, _CHUNK):
            piece = documents[start : start + _CHUNK + 1]
            if np.any(piece[1:] < piece[:-1]):
                at = start + int(np.argmax(piece[1:] < piece[:-1]))
                raise DataError(
                    f"{path}: the document index decreases at entry {at + 1}: "
                    f"{documents[at]} then {documents[at + 1]}"
                )
        end = 0
        for start in range(0, count, _CHUNK):
            lengths = self.sequence_lengths[start : start + _CHUNK]
            if np.any(lengths < 0):
                at = start + int(np.argmax(lengths < 0))
                raise DataError(
                    f"{path}: sequence {at} has negative length {self.sequence_lengths[at]}"
                )
            expected = end + sequence_pointers(lengths, self.dtype.itemsize)
            wrong = self.sequence_pointers[start : start + _CHUNK] != expected
            if np.any(wrong):
                at = start + int(np.argmax(wrong))
                raise DataError(
                    f"{path}: sequence {at} is said to start at byte "
                    f"{self.sequence_pointers[at]}, but the lengths before it add up to "
                    f"{expected[at - start]}; the file is damaged"
                )
            end = int(expected[-1]) + int(lengths[-1]) * self.dtype.itemsize
        self._num_bytes = end

    def _check_size_of_bin(self, idx: Path | RemoteFile, bin_: Path | RemoteFile) -> None:
        actual = bin_.size() if isinstance(bin_, RemoteFile) else bin_.stat().st_size
        if actual != self._num_bytes:
            raise DataError(
                f"{bin_}: {actual} bytes, expected {self._num_bytes} from {idx.name} "
                f"({len(self)} sequences of {self.dtype.name}); the file is truncated or "
                "belongs to another index"
            )

    def __len__(self) -> int:
        return self.sequence_lengths.size

    def __getitem__(self, index: int) -> NDArray:  # type: ignore[override]
        """The tokens of one sequence, `[length]`, a read-only view of the file."""
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Tokens `[offset, offset + length)` of sequence `index`; to its end without `length`.

        Raises:
            IndexError: no such sequence, or the range is not inside it.
        """
        i = operator.index(index)
        if i < 0:
            i += len(self)
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.prefix}")
        available = int(self.sequence_lengths[i]) - offset
        length = available if length is None else length
        if offset < 0 or not 0 <= length <= available:
            raise IndexError(
                f"tokens [{offset}, {offset + length}) of sequence {i} of {self.prefix}, "
                f"which has {self.sequence_lengths[i]}"
            )
        start = int(self.sequence_pointers[i]) // self.dtype.itemsize + offset
        return self._tokens[start : start + length]

    def document_of(self, index: int) -> int:
        """Number of the document that sequence `index` belongs to."""
        return int(np.searchsorted(self.document_indices, index, side="right")) - 1

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.document_indices.size - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return self._num_bytes // self.dtype.itemsize

    def fingerprint(self) -> int:
        """CRC-32 of the set's sizes and of samples of its lengths and tokens.

        Equal for a copy in another folder. Reads a bounded amount: up to 256 pieces of 256 tokens,
        and as many lengths, spread evenly; small sets are read whole.
        """
        crc = zlib.crc32(repr((self.dtype.str, len(self), self.num_documents)).encode())
        for values in (self.sequence_lengths, self._tokens):
            crc = zlib.crc32(repr(values.size).encode(), crc)
            for start in np.unique(np.linspace(0, max(0, values.size - 256), 256).astype(np.int64)):
                crc = zlib.crc32(values[start : start + 256].tobytes(), crc)
        return crc

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        # A worker process maps the files itself.
        return type(self), (self.prefix,)


def _map(path: Path | RemoteFile) -> mmap.mmap | bytes:
    if isinstance(path, RemoteFile):
        return path.read()
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class IndexedDatasetWriter:
    """Writes a `.bin/.idx` pair; usable as a context manager.

    The files get their names only in :meth:`finalize`, which a `with` block calls at its end. After
    an error in the block nothing is left of them::

        with IndexedDatasetWriter("corpus", optimal_dtype(vocab_size)) as writer:
            writer.add_document([np.array([5, 6, 7])])

    Args:
        prefix: path of the pair without `.bin` / `.idx`; missing folders are made.
        dtype: type of the stored tokens, one of `DTYPE_CODES`.

    Raises:
        DataError: dtype has no code in the format, or the files cannot be written.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: DTypeLike) -> None:
        self.prefix = os.fspath(prefix)
        if is_remote(self.prefix):
            raise DataError(
                f"{self.prefix}: a set is written to a folder on a file system, not to a URL; "
                "write it locally and copy the .bin and .idx files"
            )
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODE_OF:
            known = ", ".join(d.name for d in DTYPE_CODES.values())
            raise DataError(f"{self.prefix}: tokens cannot be stored as {dtype}; possible: {known}")
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._partial_bin = Path(f"{self.prefix}.bin.partial")
        self._partial_idx = Path(f"{self.prefix}.idx.partial")
        try:
            self._partial_bin.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial_bin.open("wb")
        except OSError as error:
            raise DataError(f"{self._partial_bin}: cannot be written: {error.strerror}") from error

    def add_document(self, sequences: Iterable[Sequence[int] | NDArray]) -> None:
        """Append one document, given as its sequences (usually one), each `[length]`.

        Raises:
            DataError: an id does not fit the dtype, or the document has 2^31 tokens or more.
                Nothing of the document is written then.
        """
        arrays = [np.asarray(sequence) for sequence in sequences]
        total = sum(a.size for a in arrays)
        if total > MAX_DOCUMENT_TOKENS:
            raise DataError(
                f"{self.prefix}: document {len(self._documents) - 1} has {total} tokens; the "
                f"format holds at most {MAX_DOCUMENT_TOKENS}: split the document"
            )
        converted = [self._convert(a) for a in arrays]
        for a in converted:
            self._file.write(a.data)
            self._lengths.append(a.size)
        self._documents.append(len(self._lengths))

    def add_documents(
        self, tokens: NDArray, sequence_lengths: NDArray, document_lengths: NDArray
    ) -> None:
        """Append many documents as :meth:`add_document` would, at about the cost of one.

        Args:
            tokens: integers `[tokens]`, all sequences end to end.
            sequence_lengths: `[sequences]` [tokens], their sum is the number of tokens.
            document_lengths: `[documents]` [sequences], their sum is the number of sequences.

        Raises:
            DataError: as :meth:`add_document`, naming the document.
        """
        ends = np.concatenate(([0], np.cumsum(sequence_lengths, dtype=np.int64)))
        firsts = np.concatenate(([0], np.cumsum(document_lengths, dtype=np.int64)))
        if ends[-1] != tokens.size or firsts[-1] != len(sequence_lengths):
            raise ValueError(
                f"{tokens.size} tokens and {len(sequence_lengths)} sequences, but the lengths add "
                f"up to {ends[-1]} and {firsts[-1]}"
            )
        limits = np.iinfo(self.dtype) if self.dtype.kind in "iu" else None
        if (
            limits is None
            or np.any(np.diff(ends[firsts]) > MAX_DOCUMENT_TOKENS)
            or (tokens.size and (tokens.min() < limits.min or tokens.max() > limits.max))
        ):
            # One at a time, so that the error names the document.
            for first, last in itertools.pairwise(firsts):
                self.add_document(tokens[ends[i] : ends[i + 1]] for i in range(first, last))
            return
        self._file.write(np.ascontiguousarray(tokens, self.dtype).data)
        before = len(self._lengths)
        self._lengths.frombytes(np.ascontiguousarray(sequence_lengths, "<i4").tobytes())
        self._documents.frombytes((firsts[1:] + before).astype("<i8").tobytes())

    def _convert(self, tokens: NDArray) -> NDArray:
        document = len(self._documents) - 1
        if tokens.ndim != 1:
            raise DataError(
                f"{self.prefix}: a sequence of document {document} has shape {tokens.shape}; "
                "a sequence is one-dimensional"
            )
        if tokens.size and not np.can_cast(tokens.dtype, self.dtype, "same_kind"):
            # Unsigned from signed is not "same kind", but right as long as every value fits.
            if not (tokens.dtype.kind in "iu" and self.dtype.kind in "iu"):
                raise DataError(
                    f"{self.prefix}: document {document} holds {tokens.dtype.name} values, which "
                    f"cannot be stored as {self.dtype.name}"
                )
        if tokens.size and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"{self.prefix}: document {document} holds id "
                    f"{low if low < limits.min else high}, outside {self.dtype.name} "
                    f"[{limits.min}, {limits.max}]; take the dtype from "
                    "optimal_dtype(vocab_size) of the tokenizer in use"
                )
        return np.ascontiguousarray(tokens, dtype=self.dtype)

    def add_index(self, other_prefix: str | os.PathLike) -> None:
        """Append all documents of another set, as if they had been added here one by one.

        Raises:
            DataError: the other set is damaged, has another dtype, or is multimodal.
        """
        other = IndexedDataset(other_prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{other.prefix}: holds {other.dtype.name}, but {self.prefix} is written as "
                f"{self.dtype.name}; sets that are merged need one dtype"
            )
        if other.sequence_modes is not None:
            raise DataError(
                f"{other.prefix}: is multimodal; its sequence modes would be lost in a merge"
            )
        before = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        self._documents.frombytes((other.document_indices[1:] + before).tobytes())
        with bin_path(other_prefix).open("rb") as source:
            shutil.copyfileobj(source, self._file, 16 << 20)

    def finalize(self) -> None:
        """Write the index and give both files their names; later calls do nothing."""
        if self._file.closed:
            return
        lengths = np.frombuffer(self._lengths, "<i4") if self._lengths else np.zeros(0, "<i4")
        documents = np.frombuffer(self._documents, "<i8")
        _flush(self._file)
        with self._partial_idx.open("wb") as idx:
            code = _CODE_OF[self.dtype]
            idx.write(_HEADER.pack(MAGIC, VERSION, code, lengths.size, documents.size))
            idx.write(lengths.tobytes())
            idx.write(sequence_pointers(lengths, self.dtype.itemsize).astype("<i8").tobytes())
            idx.write(documents.tobytes())
            _flush(idx)
        # The old index goes first and the new one comes last: at no time does a pair exist whose
        # halves belong to different sets.
        idx_path(self.prefix).unlink(missing_ok=True)
        self._partial_bin.replace(bin_path(self.prefix))
        self._partial_idx.replace(idx_path(self.prefix))
        self._file.close()

    def discard(self) -> None:
        """Drop what was written so far; does nothing after :meth:`finalize`."""
        if self._file.closed:
            return
        self._file.close()
        self._partial_bin.unlink(missing_ok=True)
        self._partial_idx.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.finalize()
        except BaseException:
            self.discard()
            raise


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
