"""Offline verification of a checkpoint: every file and every array, in bounded memory.

Arrays are read block by block through TensorStore and digested on the CPU, so no accelerator and no
mesh are needed and an array larger than memory can be checked.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from jaxtron.checkpoint.digest import block_sums, to_hex
from jaxtron.checkpoint.manifest import damaged_files, read_manifest
from jaxtron.checkpoint.meta import ArrayRecord, read_meta
from jaxtron.checkpoint.store import STATE_ITEM
from jaxtron.errors import CheckpointError

_block_sums = jax.jit(block_sums)


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcome of a verification.

    Attributes:
        step: the step's number.
        files: files whose size (and CRC-32, where taken) was checked.
        arrays: arrays whose digest was recomputed.
        problems: what is wrong, one line each; empty: sound.
    """

    step: int
    files: int
    arrays: int
    problems: tuple[str, ...]


def verify_step(step_dir: Path) -> Report:
    """Check all files and arrays of one step.

    Args:
        step_dir: folder of the step.

    Returns:
        The report; damage does not raise.
    """
    step = int(step_dir.name)
    problems = []
    files = 0
    try:
        manifest = read_manifest(step_dir)
        files = len(manifest)
        problems += [f"file {n} {what}" for n, what in damaged_files(step_dir, manifest).items()]
    except CheckpointError as error:
        problems.append(str(error))
    try:
        arrays = read_meta(step_dir).arrays
    except CheckpointError as error:
        return Report(step, files, 0, (*problems, str(error)))
    for name, record in arrays.items():
        problem = _array_problem(step_dir, name, record)
        if problem is not None:
            problems.append(f"array {name} {problem}")
    return Report(step, files, len(arrays), tuple(problems))


def _array_problem(step_dir: Path, name: str, record: ArrayRecord) -> str | None:
    try:
        array = _open_array(step_dir, name)
        if tuple(array.shape) != record.shape or array.dtype.name != record.dtype:
            return (
                f"is stored as {array.dtype.name}{list(array.shape)} instead of "
                f"{record.dtype}{list(record.shape)}"
            )
        digest = _digest(array)
    except (ValueError, OSError) as error:  # TensorStore raises ValueError for damaged data
        return f"cannot be read: {(str(error).splitlines() or [''])[0][:200]}"
    if digest != record.digest:
        return f"has digest {digest} instead of {record.digest}"
    return None


def _open_array(step_dir: Path, name: str) -> tensorstore.TensorStore:
    """Open one array where Orbax put it: Zarr 3 in an OCDBT store, nested keys joined by dots."""
    spec = {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": f"file://{step_dir / STATE_ITEM}/",
            "path": f"{name.replace('/', '.')}/",
        },
    }
    return tensorstore.open(spec, open=True, read=True).result()


def _digest(array: tensorstore.TensorStore) -> str:
    total = np.zeros(2, np.uint32)
    shape: tuple[int, ...] = tuple(array.shape)
    chunk = tuple(int(n or 1) for n in array.chunk_layout.read_chunk.shape or ())  # scalar: None
    for start, stop in _blocks(shape, chunk):
        index = tuple(slice(a, b) for a, b in zip(start, stop))
        block = array[index].read().result()
        offset = np.asarray(start, np.uint32)
        total += np.asarray(_block_sums(jnp.asarray(block), jnp.asarray(offset)))
    return to_hex(total)


def _blocks(
    shape: tuple[int, ...], chunk: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """First and last-plus-one index of each stored chunk."""
    ranges = [range(0, size, step) for size, step in zip(shape, chunk)]
    for start in itertools.product(*ranges):
        yield start, tuple(min(a + c, n) for a, c, n in zip(start, chunk, shape))
