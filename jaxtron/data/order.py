"""Whether a run that goes on reads the samples it would have read without the stop.

The order of an indexed dataset depends on how often it is repeated, and so on `train.steps`; it
also changes with the files themselves. A checkpoint therefore records what samples read so far
were made of.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtron.data.loader import shuffled_sample
from jaxtron.data.source import RowDataset
from jaxtron.errors import CheckpointError

_SAMPLES = 64


def order_digest(
    dataset: RowDataset | None, consumed_samples: int, *, dataloader_type: str, seed: int
) -> int | None:
    """CRC-32 of what up to 64 samples, spread over those read so far, were made of.

    Args:
        dataset: the training data; one that has a method `provenance(row) -> tuple of integers`
            says which tokens a row holds.
        consumed_samples: samples read so far.
        dataloader_type: `single` or `cyclic`, see :func:`jaxtron.data.loader.batches`.
        seed: of the `cyclic` permutations.

    Returns:
        The digest; None when the dataset does not say.
    """
    provenance = getattr(dataset, "provenance", None)
    if dataset is None or provenance is None or consumed_samples == 0:
        return None
    digest = 0
    for sample in np.unique(np.linspace(0, consumed_samples - 1, _SAMPLES).astype(np.int64)):
        row = int(sample)
        if dataloader_type == "cyclic":
            row = shuffled_sample(seed, len(dataset), row)
        if row >= len(dataset):
            return -1  # fewer rows than were read: certainly other data
        digest = zlib.crc32(repr(provenance(row)).encode(), digest)
    return digest


def file_fingerprints(dataset: RowDataset | None) -> list[int] | None:
    """What tells the dataset's files from others, wherever they lie; None if it does not say."""
    fingerprints = getattr(dataset, "fingerprints", None)
    return None if fingerprints is None else fingerprints()


def check_order(meta: Mapping[str, Any], now: int | None, where: str) -> None:
    """Refuse to go on when samples read before are no longer what they were.

    Raises:
        CheckpointError: they differ.
    """
    saved = meta.get("data_order")
    if saved is None or now is None or saved == now:
        return
    raise CheckpointError(
        f"going on from {where} would read other samples than the run it continues: the rows read "
        "so far are made of other documents now. A changed train.steps does this when the data is "
        "then repeated another number of times; so do changed .bin/.idx files. Restore them (to "
        "stop earlier, use train.exit_interval), or start a new run from the weights with "
        "checkpoint.finetune=true and another checkpoint.dir"
    )
