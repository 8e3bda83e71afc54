"""From rows on hosts to a global batch on the mesh.

Microbatch k of a step is rows ``[k R, (k+1) R)`` of its global batch on every mesh. On the device a
batch is ``[microbatch, row, sequence]``, rows split over the data axes and the sequence over
``context``, in the order of ``parallel/context/layout.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtron.mesh.rules import LogicalRules
from jaxtron.parallel.context.attention import ContextAttention
from jaxtron.parallel.context.documents import cut_padding, document_lengths

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class BatchPlacement:
    """Which rows this process loads, and where they go.

    Attributes:
        sharding: of ``[microbatch, row, sequence]`` arrays.
        num_microbatches: microbatches per step.
        rows_per_microbatch: R.
        context: the cut of the sequence over ``context``.
    """

    sharding: NamedSharding
    num_microbatches: int
    rows_per_microbatch: int
    context: ContextAttention

    @property
    def _columns(self) -> list[int]:
        """Rows within a microbatch that this process's devices need, ascending."""
        r = self.rows_per_microbatch
        # the sequence length does not matter for the rows, only that it can be split
        shape = (self.num_microbatches, r, self.sharding.num_devices)
        indices = self.sharding.addressable_devices_indices_map(shape).values()
        return sorted({c for index in indices if index for c in range(r)[index[1]]})

    @property
    def rows(self) -> list[int]:
        """Rows of the global batch that this process loads, ascending."""
        return self.rows_of(self.num_microbatches * self.rows_per_microbatch)

    def rows_of(self, global_batch_size: int) -> list[int]:
        """The same for a batch with another number of microbatches (a growing batch)."""
        columns, r = self._columns, self.rows_per_microbatch
        return [k * r + c for k in range(global_batch_size // r) for c in columns]

    def place(self, batch: Batch) -> dict[str, jax.Array]:
        """Put this process's rows ``{name: [len(rows), seq]}`` on its devices.

        Their number decides the number of microbatches.

        Returns:
            global arrays ``{name: [microbatch, R, seq]}``; the tokens of a row lie in the order in
            which the members of ``context`` hold them. Packed rows get one more, unless it is
            there: ``document_length``, that of every token's document, 0 for padding.
        """
        if "segment_ids" in batch and "document_length" not in batch:
            lengths = document_lengths(batch["segment_ids"], batch["loss_mask"])
            batch = {**batch, "document_length": lengths}
        if "segment_ids" in batch:
            documents = cut_padding(batch["segment_ids"], batch["document_length"])
            batch = {**batch, "segment_ids": documents}
        batch = self.context.balanced(batch)
        r = self.rows_per_microbatch
        position = {column: i for i, column in enumerate(self._columns)}

        def put(local: np.ndarray) -> jax.Array:
            local = self.context.place(local)
            m = len(local) // len(position)
            local = local.reshape(m, len(position), *local.shape[1:])
            shape = (m, r, *local.shape[2:])

            def shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None  # every device of this process holds a part
                own = [position[c] for c in range(r)[index[1]]]
                return local[index[0], own][:, :, *index[2:]]

            return jax.make_array_from_callback(shape, self.sharding, shard)

        return {name: put(np.asarray(array)) for name, array in batch.items()}


def batch_placement(
    mesh: Mesh,
    rules: LogicalRules,
    num_microbatches: int,
    rows_per_microbatch: int,
    context: ContextAttention,
) -> BatchPlacement:
    """Placement of a step's batch on ``mesh``."""
    spec = PartitionSpec(None, rules.axes("batch") or None, rules.axes("sequence") or None)
    return BatchPlacement(NamedSharding(mesh, spec), num_microbatches, rows_per_microbatch, context)
