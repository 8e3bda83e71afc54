"""Blends: one stream of samples drawn from several datasets in given proportions.

The order is Megatron's greedy rule (`core/datasets/helpers.cpp`): sample i comes from the dataset
that is furthest behind its share, argmax over d of `weight_d * max(i, 1) - drawn_d`, the lowest d
among equals. Two things differ from Megatron, both where it fails: a dataset of weight zero is
never drawn, and a component is asked for as many samples as the blend draws from it, so that no
index runs past its end.

The rule looks at every sample in turn: some microseconds each, so `data.cache_dir` is worth setting
for blends of tens of millions of samples.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.cache import cached_arrays
from jaxtron.data.masks import Row
from jaxtron.data.source import RowDataset
from jaxtron.errors import ConfigError

# Each component of a weighted blend is built with so many samples more than its share. The number
# of samples decides about epochs, hence about the order: it is part of Megatron's result.
_SURPLUS = 0.005
_MAX_DATASETS = 2**15 - 1


Entry = str | float | list[Any]
"""Of a list of paths: a prefix, a weight, or a list of the same form in the place of a prefix."""


def parse_blend(
    entries: Sequence[Entry], key: str = "data.paths"
) -> tuple[list[str | list[Any]], list[float] | None]:
    """Parts and weights of `[part, …]` or `[weight, part, weight, part, …]`.

    Args:
        entries: what the user gave; weights may be numbers or text.
        key: name of the configuration key, for messages.

    Returns:
        (parts, weights): a part is a prefix or a nested blend, itself unparsed; weights are None
        for a plain list of parts. Nested plain lists of a plain list are merged into it.

    Raises:
        ConfigError: weights and prefixes do not alternate, a weight is not a finite number >= 0,
            all are zero, a nested blend is wrong in one of these ways or empty, or one with
            weights stands in a plain list, where parts are drawn by their sizes.
    """
    right = "right would be [prefix, …] or [weight, prefix, weight, prefix, …]"
    weights = [_as_number(entry) for entry in entries[0::2]]
    paired = len(entries) % 2 == 0 and all(w is not None for w in weights)
    parts: list[str | list[Any]] = []
    for part in entries[1::2] if paired else entries:
        if isinstance(part, list):
            parts += _nested(part, key, merge=not paired and len(entries) > 1)
        elif not isinstance(part, str) or _as_number(part) is not None:
            raise ConfigError(f"{key}: {part!r} stands where a dataset prefix should; {right}")
        else:
            parts.append(part.strip())
    if not paired or not entries:
        return parts, None
    numbers = [w for w in weights if w is not None]
    for weight in numbers:
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"{key}: {weight} is not a weight; weights are finite and >= 0")
    if not any(numbers):
        raise ConfigError(f"{key}: all weights are zero, nothing would be drawn")
    return parts, numbers


def _nested(entries: list[Any], key: str, *, merge: bool) -> list[str | list[Any]]:
    """A nested blend, checked, as the only part or, to ``merge``, the parts of a plain list."""
    parts, weights = parse_blend(entries, key)
    if not parts:
        raise ConfigError(f"{key}: an empty list stands where a dataset prefix should")
    if merge and weights is not None:
        raise ConfigError(
            f"{key}: {entries} has weights but stands in a list without, whose parts are drawn by "
            "their sizes, and a weighted blend has none; give every part of the list a weight"
        )
    return parts if merge else [entries]


def drawn_prefixes(entries: Sequence[Entry], key: str = "data.paths") -> list[str]:
    """All prefixes that a blend draws from (weight zero: none), in their order."""
    parts, weights = parse_blend(entries, key)
    drawn = []
    for part, weight in zip(parts, weights or [1.0] * len(parts)):
        if weight > 0:
            drawn += drawn_prefixes(part, key) if isinstance(part, list) else [part]
    return drawn


def _as_number(entry: Any) -> float | None:
    try:
        return None if isinstance(entry, bool) else float(entry)
    except (ValueError, TypeError):
        return None


def normalize(weights: Sequence[float] | NDArray) -> NDArray[np.float64]:
    """Weights scaled to sum to 1."""
    array = np.asarray(weights, dtype=np.float64)
    return array / np.sum(array)


@dataclass(frozen=True)
class BlendIndices:
    """Which sample of which dataset stands at each place of the blend.

    Attributes:
        dataset_index: int16 `[samples]`, number of the dataset.
        dataset_sample_index: int64 `[samples]`, row of that dataset.
    """

    dataset_index: NDArray[np.int16]
    dataset_sample_index: NDArray[np.int64]


def build_blend_indices(
    weights: NDArray[np.float64], size: int, capacities: Sequence[int] | None = None
) -> BlendIndices:
    """The greedy order of `size` samples.

    Args:
        weights: share of each dataset, summing to 1.
        size: samples of the blend.
        capacities: rows that each dataset has; one that is used up is passed over. None: unlimited.

    Raises:
        ValueError: the capacities do not add up to `size`, or there are too many datasets.
    """
    if len(weights) > _MAX_DATASETS:
        raise ValueError(f"{len(weights)} datasets in a blend; at most {_MAX_DATASETS}")
    if capacities is not None and sum(capacities) < size:
        raise ValueError(f"{size} samples from datasets that hold {sum(capacities)}")
    drawn = np.zeros(len(weights), dtype=np.float64)
    behind = np.empty_like(drawn)
    # A dataset behind by minus infinity is never the argmax.
    barred = np.where(np.asarray(weights) > 0, 0.0, -np.inf)
    dataset_index = np.empty(size, dtype=np.int16)
    sample_index = np.empty(size, dtype=np.int64)
    for i in range(size):
        np.multiply(weights, max(i, 1), out=behind)
        np.subtract(behind, drawn, out=behind)
        behind += barred
        d = int(behind.argmax())
        dataset_index[i] = d
        sample_index[i] = drawn[d]
        drawn[d] += 1
        if capacities is not None and drawn[d] >= capacities[d]:
            barred[d] = -np.inf
    return BlendIndices(dataset_index, sample_index)


def cached_blend_indices(
    weights: NDArray[np.float64],
    size: int,
    capacities: Sequence[int] | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> BlendIndices:
    """As :func:`build_blend_indices`, kept in `cache_dir` between runs."""

    def build() -> dict[str, NDArray]:
        return vars(build_blend_indices(weights, size, capacities))

    description = {
        "kind": "blend indices, version 1",
        "weights": weights.tolist(),
        "size": size,
        "capacities": None if capacities is None else list(capacities),
    }
    return BlendIndices(**cached_arrays(cache_dir, description, build))


def concatenated_indices(sizes: Sequence[int]) -> BlendIndices:
    """The order of datasets with `sizes` rows one after another, every row once."""
    return BlendIndices(
        np.repeat(np.arange(len(sizes), dtype=np.int16), sizes),
        np.concatenate([np.arange(size, dtype=np.int64) for size in sizes]),
    )


@dataclass(frozen=True)
class BlendPlan:
    """A weighted blend before its components are built.

    Attributes:
        requests: samples to ask of each component, `[datasets]`; 0 where the weight is zero.
        indices: the order; its length is what Megatron makes it, the sum of the rounded-up shares.
    """

    requests: list[int]
    indices: BlendIndices


def plan_weighted_blend(
    weights: Sequence[float], num_samples: int, cache_dir: str | os.PathLike | None = None
) -> BlendPlan:
    """How `num_samples` samples (a few more, by rounding) are drawn in proportion to `weights`."""
    shares = normalize(weights)
    targets = [math.ceil(num_samples * share) for share in shares.tolist()]
    # Megatron normalises once more here, which can change the last bit and with it a tie.
    indices = cached_blend_indices(normalize(shares), sum(targets), None, cache_dir)
    drawn = np.bincount(indices.dataset_index, minlength=len(targets)).tolist()
    requests = [
        max(math.ceil(target * (1 + _SURPLUS)), count) for target, count in zip(targets, drawn)
    ]
    return BlendPlan(requests, indices)


class BlendedDataset:
    """Random access to a blend.

    Args:
        datasets: the components; one that is never drawn may be None.
        indices: the order.
        name: for messages.
    """

    def __init__(
        self, datasets: Sequence[RowDataset | None], indices: BlendIndices, name: str = "blend"
    ) -> None:
        self.name = name
        self.datasets = list(datasets)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices.dataset_index)

    def __getitem__(self, index: int) -> Row:
        """Row `index` of the blend.

        Raises:
            IndexError: no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.name}")
        dataset, row = self._component(index)
        return dataset[row]

    def provenance(self, index: int) -> tuple[int, ...]:
        """Component of row `index`, and which tokens of it (or which row) the row holds."""
        dataset, row = self._component(index)
        inner = getattr(dataset, "provenance", None)
        component = int(self.indices.dataset_index[index])
        return (component, *(inner(row) if inner else (row,)))

    def fingerprints(self) -> list[int] | None:
        """Of the files of all components in order; None when one of them does not say."""
        found = []
        for dataset in self.datasets:
            inner = getattr(dataset, "fingerprints", None)
            own = inner() if inner else None
            if own is None:
                return None
            found += own
        return found

    def _component(self, index: int) -> tuple[RowDataset, int]:
        dataset = self.datasets[int(self.indices.dataset_index[index])]
        if dataset is None:
            raise ValueError(f"{self.name}: the order draws from a dataset that was not given")
        return dataset, int(self.indices.dataset_sample_index[index])
