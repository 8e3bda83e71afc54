"""The record that makes a folder a jaxtron checkpoint: ``<step>/meta/meta.json``.

It holds the format version, the step, what the trainer wants to know before it resumes (consumed
samples, the configuration), and one line per array: shape, dtype and digest. A SHA-256 over the
rest protects the record itself.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtron.errors import CheckpointError

FORMAT = "jaxtron-checkpoint"
FORMAT_VERSION = 1
META_FILE = "meta.json"
META_PATH = f"meta/{META_FILE}"


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """One array of the state: global shape, dtype name, digest (16 hex digits)."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclasses.dataclass(frozen=True)
class CheckpointMeta:
    """What a checkpoint says about itself.

    Attributes:
        step: optimizer steps taken.
        run: the trainer's own record (``consumed_samples``, ``config``, ...), as given to ``save``.
        arrays: every stored array by name.
        versions: of jaxtron, jax and orbax that wrote it.
        format_version: of this record and the files beside it.
    """

    step: int
    run: dict[str, Any]
    arrays: dict[str, ArrayRecord]
    versions: dict[str, str]
    format_version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """The record as stored, with its checksum."""
        body = {"format": FORMAT, **dataclasses.asdict(self)}
        # Once through JSON: tuples become lists and keys strings, as they will be when read back.
        body = json.loads(_canonical(body))
        return {**body, "checksum": _checksum(body)}

    @property
    def model_digest(self) -> str:
        """One digest of all weights (16 hex digits): equal weights, equal digest, on any mesh."""
        lines = [
            f"{name} {record.dtype} {list(record.shape)} {record.digest}"
            for name, record in sorted(self.arrays.items())
            if name.startswith("params/")
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @property
    def parameters(self) -> int:
        """Number of stored model parameters."""
        return sum(
            _size(record.shape)
            for name, record in self.arrays.items()
            if name.startswith("params/")
        )


def read_meta(step_dir: Path) -> CheckpointMeta:
    """Read and check the record of one step.

    Raises:
        CheckpointError: the record is missing, damaged, of another program or of a newer format.
    """
    path = step_dir / META_PATH
    try:
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{step_dir} is not a complete jaxtron checkpoint: cannot read {path}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: not JSON ({error})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f'{path} is not a jaxtron checkpoint: no "format": "{FORMAT}" in it')
    # The version comes before the checksum: a newer format may compute it otherwise.
    version = body.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{step_dir} has checkpoint format {version}, written by jaxtron "
            f"{_versions(body).get('jaxtron', '(unknown)')}; this jaxtron reads formats up to "
            f"{FORMAT_VERSION}: use that version or newer"
        )
    checksum = body.pop("checksum", None)
    if checksum != _checksum(body):
        raise CheckpointError(f"{path} is damaged: its contents do not match its checksum")
    return CheckpointMeta(
        step=body["step"],
        run=body["run"],
        arrays={
            name: ArrayRecord(tuple(record["shape"]), record["dtype"], record["digest"])
            for name, record in body["arrays"].items()
        },
        versions=body["versions"],
        format_version=body["format_version"],
    )


def _versions(body: Mapping[str, Any]) -> Mapping[str, Any]:
    versions = body.get("versions")
    return versions if isinstance(versions, Mapping) else {}


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
