"""Reading compressed files as plain ones; the kind is told by the first bytes, not by the name."""

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxtron.data.remote import RemoteFile
from jaxtron.errors import ConfigError, DataError

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after 0x50 to 0x5f: a frame that pzstd puts first
_NOT_TEXT = {
    rb"BZh\d1AY": "bzip2-compressed",
    rb"\xfd7zXZ": "xz-compressed",
    rb"PK\x03\x04": "a zip archive",
    rb"PAR1": "a Parquet file",
    rb"\xff\xfe": "UTF-16 text",
    rb"\xfe\xff": "UTF-16 text",
}
_CHUNK = 1 << 20


@contextmanager
def open_decompressed(path: Path | RemoteFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open ``path`` for reading: (stream of plain bytes, the file itself, for its position).

    Raises:
        DataError: the file cannot be read, its compressed data is damaged or cut off (also while
            the block reads), or it is of a known form that is neither text nor compressed so.
        ConfigError: it is Zstandard-compressed and the package ``zstandard`` is not installed.
    """
    try:
        with path.open() if isinstance(path, RemoteFile) else path.open("rb") as file:
            magic = file.read(8)
            file.seek(0)
            for start, form in _NOT_TEXT.items():
                if re.match(start, magic):
                    raise DataError(
                        f"{path} is {form}: give UTF-8 text, plain, gzip- or Zstandard-compressed"
                    )
            if magic.startswith(_GZIP_MAGIC):
                with gzip.GzipFile(fileobj=file) as unzipped:
                    yield io.BufferedReader(unzipped, _CHUNK), file
            elif magic.startswith(_ZSTD_MAGIC) or magic[1:4] == _ZSTD_SKIPPABLE:
                yield io.BufferedReader(_ZstdReader(file, path), _CHUNK), file
            else:
                yield file, file
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


class _ZstdReader(io.RawIOBase):
    """All frames of a file; unlike zstandard's own reader, it notices when the last is cut off."""

    def __init__(self, file: BinaryIO, path: Path | RemoteFile) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError(
                f"{path} is Zstandard-compressed, which needs the package zstandard: "
                "pip install zstandard"
            ) from error
        self._file = file
        self._errors = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._plain = b""

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``; 0 at the end of the last frame."""
        while not self._plain:
            compressed = self._file.read(_CHUNK // 8)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a Zstandard frame")
                return 0
            self._plain = self._decompress(compressed)
        taken = self._plain[: len(buffer)]
        buffer[: len(taken)] = taken
        self._plain = self._plain[len(taken) :]
        return len(taken)

    def _decompress(self, compressed: bytes) -> bytes:
        pieces = []
        while compressed:
            self._frame = self._frame or self._new_frame()
            try:
                pieces.append(self._frame.decompress(compressed))
            except self._errors as error:
                raise OSError(f"damaged Zstandard data: {error}") from error
            compressed = b""
            if self._frame.eof:
                compressed = self._frame.unused_data
                self._frame = None
        return b"".join(pieces)
