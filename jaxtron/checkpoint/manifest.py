"""The list of a checkpoint's files with sizes and checksums: ``<step>/manifest.json``.

It is written last, before the folder gets its final name, so a complete checkpoint always has one.
Sizes tell a partly copied folder at once; the CRC-32s, made by reading each file back, let
``checkpoint verify`` find later damage in any file.
"""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtron.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
# Orbax writes these after everything else; nothing that is loaded depends on them.
_UNLISTED = {MANIFEST_FILE, "_CHECKPOINT_METADATA", "commit_success.txt"}
_BLOCK = 1 << 22
_THREADS = 8


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """One file: size in bytes, CRC-32 as 8 hex digits (None: not taken)."""

    size: int
    crc32: str | None


def write_manifest(step_dir: Path, *, checksums: bool) -> None:
    """List all files under ``step_dir``; with ``checksums``, read each one back."""
    paths = [
        path
        for path in sorted(step_dir.rglob("*"))
        if path.is_file() and str(path.relative_to(step_dir)) not in _UNLISTED
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        crcs = list(pool.map(_crc32, paths)) if checksums else [None] * len(paths)
    files = {
        str(path.relative_to(step_dir)): {"size": path.stat().st_size, "crc32": crc}
        for path, crc in zip(paths, crcs)
    }
    body = {"files": files, "checksum": _checksum(files)}
    (step_dir / MANIFEST_FILE).write_text(json.dumps(body, indent=1), encoding="utf-8")


def read_manifest(step_dir: Path) -> dict[str, FileRecord]:
    """The listed files by path relative to ``step_dir``.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    path = step_dir / MANIFEST_FILE
    try:
        body = json.loads(path.read_bytes())
        files, checksum = body["files"], body["checksum"]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: not a manifest ({error})") from error
    if checksum != _checksum(files):
        raise CheckpointError(f"{path} is damaged: its contents do not match its checksum")
    return {name: FileRecord(record["size"], record["crc32"]) for name, record in files.items()}


def misfit_files(step_dir: Path, files: Mapping[str, FileRecord]) -> dict[str, str]:
    """Files that are absent or of another size than listed, each with what is wrong."""
    problems = {}
    for name, record in files.items():
        try:
            size = (step_dir / name).stat().st_size
        except OSError as error:
            problems[name] = f"cannot be read: {error.strerror}"
            continue
        if size != record.size:
            problems[name] = f"has {size} bytes instead of {record.size}"
    return problems


def damaged_files(step_dir: Path, files: Mapping[str, FileRecord]) -> dict[str, str]:
    """Files whose size or CRC-32 is not as listed, each with what is wrong."""
    problems = misfit_files(step_dir, files)
    for name, record in files.items():
        if name in problems or record.crc32 is None:
            continue
        crc = _crc32(step_dir / name)
        if crc != record.crc32:
            problems[name] = f"has CRC-32 {crc} instead of {record.crc32}"
    return problems


def _crc32(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def _checksum(files: object) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
