"""Files behind a URL (``s3://bucket/file``), read through fsspec."""

import functools
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxtron.errors import ConfigError, DataError

BLOCK_BYTES = 4 << 20
"""Size of one read of a token file [bytes]."""
CACHED_BLOCKS = 64
"""Blocks of a token file kept in memory."""


def is_remote(path: str) -> bool:
    """Whether a path is a URL that fsspec opens."""
    return "://" in path


class RemoteFile:
    """One file behind a URL.

    Raises:
        ConfigError: fsspec, or its package for this kind of URL, is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            import fsspec

            self._system: Any
            self._system, self._path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ConfigError(
                f"{url} is read with fsspec and its package for this storage: {error}; "
                "pip install 'jaxtron[remote]' and that package (s3fs, gcsfs, adlfs, ...)"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{url} cannot be opened: {error}") from error

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rsplit("/", 1)[-1]

    def is_file(self) -> bool:
        """Whether the file exists."""
        return self._system.isfile(self._path)

    def size(self) -> int:
        """Its size [bytes]."""
        return self._system.size(self._path)

    def open(self) -> BinaryIO:
        """The file for reading."""
        return self._system.open(self._path, "rb")

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes ``[start, end)``, by default all of them.

        Raises:
            DataError: the storage refuses.
        """
        try:
            return self._system.cat_file(self._path, start=start, end=end)
        except OSError as error:
            raise DataError(f"{self.url} cannot be read: {error}") from error


class RemoteTokens:
    """Slices of a remote token file, read in blocks of which the last used ones are kept.

    Args:
        file: the ``.bin`` file.
        dtype: of the tokens.
        size: number of tokens.
    """

    def __init__(self, file: RemoteFile, dtype: np.dtype, size: int) -> None:
        self.size = size
        self._dtype = dtype
        self._file = file
        self._bytes = size * dtype.itemsize
        self._block = functools.lru_cache(maxsize=CACHED_BLOCKS)(self._read_block)

    def __getitem__(self, tokens: slice) -> NDArray:
        """Tokens ``[start, stop)``."""
        start = tokens.start * self._dtype.itemsize
        stop = min(tokens.stop * self._dtype.itemsize, self._bytes)
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        data = b"".join(self._block(number) for number in range(first, last + 1))
        offset = first * BLOCK_BYTES
        return np.frombuffer(data[start - offset : stop - offset], dtype=self._dtype)

    def _read_block(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        return self._file.read(start, min(start + BLOCK_BYTES, self._bytes))
