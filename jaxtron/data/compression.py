"""Reading compressed files as plain ones; the kind is told by the first bytes, not by the name."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxtron.data.remote import RemoteFile
from jaxtron.errors import ConfigError, DataError

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20


@contextmanager
def open_decompressed(path: Path | RemoteFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open ``path`` for reading: (stream of plain bytes, the file itself, for its position).

    Raises:
        DataError: the file cannot be read, or its compressed data is damaged or cut off; also
            while the block reads.
        ConfigError: it is Zstandard-compressed and the package ``zstandard`` is not installed.
    """
    try:
        with path.open() if isinstance(path, RemoteFile) else path.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic.startswith(_GZIP_MAGIC):
                with gzip.GzipFile(fileobj=file) as unzipped:
                    yield io.BufferedReader(unzipped, _CHUNK), file
            elif magic == _ZSTD_MAGIC:
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
