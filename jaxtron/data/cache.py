"""Index arrays kept on disk between runs.

Every process may compute and write the same entry at the same time; there is no barrier and no
special rank. An entry gets its name only when it is complete.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxtron.errors import DataError

Arrays = dict[str, NDArray]

_LAYOUT = 2  # of an entry's files; part of its name, so that older ones are never read
_SIZES = "sizes.json"  # bytes of each array file


def digest(array: NDArray) -> str:
    """A checksum of type, shape and content, for use in a cache key."""
    hasher = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()


def cached_arrays(
    cache_dir: str | os.PathLike | None,
    description: Mapping[str, object],
    build: Callable[[], Arrays],
) -> Arrays:
    """The arrays that `build` makes, from disk when an earlier call has left them there.

    Args:
        cache_dir: folder of all entries; None: always build.
        description: everything that the arrays depend on, as JSON values. Its hash is the name of
            the entry; the text is kept beside the arrays.
        build: makes the arrays.

    Raises:
        DataError: the folder cannot be written, or an entry in it cannot be read.
    """
    if cache_dir is None:
        return build()
    text = json.dumps(description, indent=1, sort_keys=True)
    entry = Path(cache_dir) / hashlib.sha256(f"{_LAYOUT}\n{text}".encode()).hexdigest()[:32]
    if not entry.is_dir():
        _write(entry, text, build())
    return _read(entry)


def _write(entry: Path, text: str, arrays: Arrays) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
        try:
            (partial / "description.json").write_text(text)
            sizes = {}
            for name, array in arrays.items():
                path = partial / f"{name}.npy"
                np.save(path, array)
                sizes[path.name] = path.stat().st_size
            (partial / _SIZES).write_text(json.dumps(sizes))
            partial.chmod(0o755)  # mkdtemp's folder is for one user; the cache is for all
            partial.rename(entry)
        except OSError:
            if not entry.is_dir():  # else another process was first, with the same content
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{entry.parent}: index cache cannot be written ({error}); "
            "set data.cache_dir to a writable folder, or to null"
        ) from error


def _read(entry: Path) -> Arrays:
    try:
        arrays = {}
        for name, size in json.loads((entry / _SIZES).read_text()).items():
            path = entry / name
            if path.stat().st_size != size:
                raise ValueError(f"{name} has {path.stat().st_size} bytes, expected {size}")
            # Memory-mapped, so that the processes of a host share one copy.
            arrays[path.stem] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{entry}: index cache entry cannot be read ({error}); delete this folder"
        ) from error
    return arrays
