"""How the global batch is cut into microbatches and data shards."""

import dataclasses
import math
from collections.abc import Mapping

from jaxtron.config.config import Config
from jaxtron.errors import ConfigError
from jaxtron.mesh.axes import BATCH_AXES


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """The cut of a global batch; microbatch k is rows ``[k·R, (k+1)·R)`` of it on every mesh.

    Attributes:
        num_microbatches: microbatches per optimizer step.
        rows_per_microbatch: R, sequences of one microbatch over all data shards.
        micro_batch_size: sequences of one microbatch on one data shard.
        data_shards: parts into which the rows of a microbatch are split.
    """

    num_microbatches: int
    rows_per_microbatch: int
    micro_batch_size: int
    data_shards: int

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.num_microbatches * self.rows_per_microbatch


def batch_layout(config: Config, axes: Mapping[str, int]) -> BatchLayout:
    """Cut ``train.global_batch_size`` by ``micro_batch_size`` or ``num_microbatches``.

    With neither given a data shard takes one sequence per microbatch.

    Args:
        config: its ``train`` section is read.
        axes: size of each mesh axis, as :func:`jaxtron.mesh.axes.resolve_axes` gives them.

    Raises:
        ConfigError: the global batch does not divide that way, or the two keys contradict.
    """
    shards = math.prod(axes[axis] for axis in BATCH_AXES)
    train = config.train
    rows = train.global_batch_size
    micro = train.micro_batch_size
    count = train.num_microbatches
    split = " × ".join(f"{axis} {axes[axis]}" for axis in BATCH_AXES if axes[axis] > 1)
    shown = f"{shards} data shard{'s' if shards > 1 else ''}" + (f" ({split})" if split else "")
    if count is not None:
        if micro is not None and micro * shards * count != rows:
            raise ConfigError(
                f"train.micro_batch_size {micro} × {shown} × train.num_microbatches {count} = "
                f"{micro * shards * count}, but train.global_batch_size is {rows}: give only one "
                f"of the two, or set train.global_batch_size to {micro * shards * count}"
            )
        _divides(rows, shards * count, f"{shown} × train.num_microbatches {count}")
        micro = rows // (shards * count)
    else:
        micro = micro or 1
        _divides(rows, micro * shards, f"train.micro_batch_size {micro} × {shown}")
        for size in (train.rampup_batch_size or ())[:2]:  # and so every size between
            if size % (micro * shards):
                raise ConfigError(
                    f"train.rampup_batch_size is {train.rampup_batch_size}: start and increment "
                    f"must be multiples of train.micro_batch_size {micro} × {shown} = "
                    f"{micro * shards}"
                )
        count = rows // (micro * shards)
    return BatchLayout(count, micro * shards, micro, shards)


def _divides(rows: int, multiple: int, product: str) -> None:
    """Refuse a global batch that is not a multiple; advise the multiples below and above it."""
    if rows % multiple == 0:
        return
    below = rows // multiple * multiple
    choices = [str(choice) for choice in (below, below + multiple) if choice]
    raise ConfigError(
        f"train.global_batch_size is {rows}, which is not a multiple of {product} = {multiple}: "
        f"set train.global_batch_size to {' or '.join(choices)}"
    )
