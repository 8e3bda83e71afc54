"""Dynamic context parallelism: the host's side.

The documents of a global batch are taken out of its rows and put into microbatches by
:mod:`jaxtron.parallel.context.schedule`. Microbatches of one menu entry that follow each other are
one call of its executable, which runs up to :data:`CALL` of them. All is a function of the batch
and the configuration, so every process makes the same plan, and a run resumes by its consumed
samples alone.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxtron.config.config import Config
from jaxtron.mesh.axes import BATCH_AXES
from jaxtron.models.config import ModelConfig
from jaxtron.observe.flops import flops_per_token
from jaxtron.parallel.context.documents import (
    Documents,
    Rows,
    document_lengths,
    find_documents,
    pack_documents,
)
from jaxtron.parallel.context.schedule import (
    CostModel,
    MenuEntry,
    ScheduledMicrobatch,
    default_menu,
    schedule,
)

CALL = 8
"""Microbatches of one call at most; their arrays are allocated in full, as shapes are static."""

LARGEST_MENU = 6
"""Two more executables start and end a step."""

FLOP_PER_BYTE = 1500
"""Operations that a GPU does while a byte comes over the link (H100, NVLink: 400 TFLOP/s, 270
GB/s)."""


@dataclass(frozen=True)
class ScheduledCall:
    """Microbatches that one executable runs one after the other.

    Attributes:
        entry: the executable.
        count: of microbatches, the rest of the arrays is padding.
        first_row: rows of the calls before it in the step.
        arrays: ``{name: [CALL * rows, context / degree * length]}``: the rows of the groups of a
            context axis side by side.
    """

    entry: MenuEntry
    count: int
    first_row: int
    arrays: dict[str, NDArray]


@dataclass(frozen=True)
class ScheduledStep:
    """A global batch, cut.

    Attributes:
        calls: in the order in which they run; none without a trained token.
        trained: tokens with a loss.
        live: tokens of documents.
    """

    calls: tuple[ScheduledCall, ...]
    trained: int
    live: int


@dataclass(frozen=True)
class DynamicContext:
    """Cuts global batches; a stage of the data pipeline, called with all rows of a step.

    Attributes:
        menu: the executables.
        context: size of the context axis.
        data_shards: groups of ``context`` devices over which rows are split.
        cost: predicts times.
    """

    menu: tuple[MenuEntry, ...]
    context: int
    data_shards: int
    cost: CostModel

    def __call__(self, batch: Rows) -> ScheduledStep:
        """The microbatches of all rows ``{name: [rows, seq]}`` of a step.

        Raises:
            DataError: numbers of documents that are not ascending.
        """
        documents = find_documents(batch["segment_ids"], batch["loss_mask"])
        microbatches = schedule(
            documents.lengths.tolist(),
            menu=self.menu,
            context=self.context,
            data_shards=self.data_shards,
            cost=self.cost,
        )
        calls: list[ScheduledCall] = []
        first_row = 0
        ordered = sorted(microbatches, key=lambda m: m.entry)
        for entry, group in itertools.groupby(ordered, key=lambda m: m.entry):
            same = list(group)
            for start in range(0, len(same), CALL):
                some = same[start : start + CALL]
                calls.append(self._call(batch, documents, entry, some, first_row))
                first_row += sum(len(microbatch.rows) for microbatch in some)
        trained = int(np.count_nonzero(batch["loss_mask"]))
        return ScheduledStep(tuple(calls), trained, int(documents.lengths.sum()))

    def _call(
        self,
        batch: Rows,
        documents: Documents,
        entry: MenuEntry,
        microbatches: list[ScheduledMicrobatch],
        first_row: int,
    ) -> ScheduledCall:
        members = [row for microbatch in microbatches for row in microbatch.rows]
        unused = CALL * len(microbatches[0].rows) - len(members)
        rows = pack_documents(batch, documents, members + [()] * unused, entry.length)
        # of whole rows, before they lie side by side
        rows["document_length"] = document_lengths(rows["segment_ids"], rows["loss_mask"])
        width = self.context // entry.degree * entry.length
        arrays = {name: array.reshape(-1, width) for name, array in rows.items()}
        return ScheduledCall(entry, len(microbatches), first_row, arrays)


def cost_model(model: ModelConfig) -> CostModel:
    """Costs in operations of one device, by the closed form of :mod:`jaxtron.observe.flops`.

    The exchange counts keys and values in bf16 in both passes, and their gradients in fp32, as if
    nothing of it were hidden.
    """
    linear = flops_per_token(model, 0).causal
    whole = dataclasses.replace(model, window_size=None)
    keys_and_values = 2 * model.query_groups * model.head_dim * model.num_layers
    return CostModel(
        linear=linear,
        quadratic=flops_per_token(whole, 1).causal - linear,
        exchange=keys_and_values * (2 + 2 + 4) * FLOP_PER_BYTE,
        window=model.window_size,
    )


def tokens_per_device(config: Config, context: int) -> int:
    """Tokens of a microbatch on a device; ``data.seq_length / context`` unless it is given."""
    given = config.parallel.max_seqlen_per_dp_cp_rank
    return config.data.seq_length // context if given is None else given


def dynamic_context(config: Config, axes: Mapping[str, int]) -> DynamicContext | None:
    """The scheduler that ``parallel.dynamic_context`` asks for; None without it.

    Raises:
        ConfigError: sizes that are no powers of two.
    """
    if not config.parallel.dynamic_context:
        return None
    context = axes["context"]
    return DynamicContext(
        menu=default_menu(
            context, tokens_per_device(config, context), config.parallel.min_dynamic_context
        ),
        context=context,
        data_shards=math.prod(axes[axis] for axis in BATCH_AXES),
        cost=cost_model(config.model),
    )
