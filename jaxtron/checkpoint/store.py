"""Writing and reading the arrays of a state with Orbax.

Host memory is bounded. A save holds one host copy of the arrays that this process writes (of each
array, one replica is written), made before ``write`` returns, so the next step may overwrite
(donate) the device arrays. Encoding and reading work on ``_IN_FLIGHT_BYTES`` at a time, and arrays
are stored in chunks of ``_CHUNK_BYTES``, so that a reader on another mesh need not hold whole
shards. Device memory is not needed for a save, and for a restore no more than the state.
"""

import math
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.checkpoint.manifest import write_manifest
from jaxtron.checkpoint.meta import META_FILE, CheckpointMeta

STATE_ITEM, META_ITEM = "state", "meta"
_IN_FLIGHT_BYTES = 8 * 10**9
_CHUNK_BYTES = 128 * 2**20
_GB = 10**9


class StateWriter:
    """Saves states of one shape to step folders, one at a time.

    Args:
        config: of the checkpoints.
        state: the first state to be written (its shard sizes set the memory limits).
    """

    def __init__(self, config: CheckpointConfig, state: Any) -> None:
        largest = _largest_shard_bytes(state)
        arrays = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True,
            use_zarr3=True,
            save_concurrent_gb=_limit_gb(_IN_FLIGHT_BYTES, largest),
        )
        handler = _StepHandler(
            checksums=config.file_checksums,
            items={
                STATE_ITEM: arrays,
                META_ITEM: ocp.JsonCheckpointHandler(filename=META_FILE),
            },
        )
        self._checkpointer = ocp.AsyncCheckpointer(handler, timeout_secs=config.timeout_s)

    def write(self, step_dir: Path, state: Any, meta: CheckpointMeta) -> None:
        """Start writing in the background; when it returns, the state may change.

        Args:
            step_dir: folder that will hold the step; must not exist.
            state: nested dicts of arrays.
            meta: its record.
        """
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), state)
        self._checkpointer.save(
            step_dir,
            args=_StepArgs(
                **{
                    STATE_ITEM: ocp.args.PyTreeSave(state, save_args=save_args),
                    META_ITEM: ocp.args.JsonSave(meta.to_json()),
                }
            ),
        )

    def wait(self) -> None:
        """Block until the last write is committed; raises what went wrong in it."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Release threads; waits like ``wait``."""
        self._checkpointer.close()


def read_state(step_dir: Path, abstract: Any, *, partial: bool) -> Any:
    """Read arrays straight into their shardings.

    Args:
        step_dir: folder of the step.
        abstract: nested dicts of ``ShapeDtypeStruct`` with shardings; shapes and dtypes as stored.
        partial: whether the checkpoint holds more arrays than ``abstract`` asks for.

    Returns:
        The same nested dicts of arrays.
    """
    # Orbax counts whole stored chunks for each shard; with thin shards up to the whole array.
    largest = max(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(abstract))
    limit = _limit_gb(_IN_FLIGHT_BYTES, largest)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit))
    try:
        return checkpointer.restore(
            step_dir / STATE_ITEM,
            args=ocp.args.PyTreeRestore(
                item=abstract,
                restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                partial_restore=partial,
            ),
        )
    finally:
        checkpointer.close()


class _StepHandler(ocp.CompositeCheckpointHandler):
    """Orbax's handler of several items, that also lists the files before the folder is renamed."""

    def __init__(self, *, checksums: bool, items: dict[str, Any]) -> None:
        super().__init__(**items)
        self._checksums = checksums

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        write_manifest(Path(directory), checksums=self._checksums)


@ocp.args.register_with_handler(_StepHandler, for_save=True, for_restore=True)
class _StepArgs(ocp.args.Composite):
    """Arguments of the items of a step."""


def _largest_shard_bytes(tree: Any) -> int:
    """Bytes of the largest piece that one device holds of any array."""

    def shard_bytes(leaf: Any) -> int:
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return max((shard_bytes(leaf) for leaf in jax.tree.leaves(tree)), default=0)


def _limit_gb(limit_bytes: int, largest_piece_bytes: int) -> float:
    """Orbax refuses a piece that is not smaller than the limit, so let the largest one pass."""
    return max(limit_bytes, 1.01 * largest_piece_bytes + 1) / _GB
