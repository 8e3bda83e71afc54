"""From `.bin/.idx` pairs to the datasets of a run: one set, a blend, or sets one after another."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtron.data.blend import (
    BlendedDataset,
    Entry,
    cached_blend_indices,
    concatenated_indices,
    drawn_prefixes,
    normalize,
    parse_blend,
    plan_weighted_blend,
)
from jaxtron.data.config import DataConfig
from jaxtron.data.fim import fill_in_the_middle
from jaxtron.data.gpt import GPTDataset
from jaxtron.data.indexed import IndexedDataset
from jaxtron.data.masks import RowFormat
from jaxtron.data.source import RowDataset
from jaxtron.data.split import SPLIT_NAMES, Span, how_to_do_without, parse_split, split_spans
from jaxtron.errors import ConfigError, DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Request:
    """What the run reads of a split or of a validation set.

    Attributes:
        split: train, valid or test.
        key: the configuration key that names the files.
        num_samples: rows; None: every token once.
        shared: the files hold all splits, and `data.split` says which documents are this one's.
    """

    split: str
    key: str
    num_samples: int | None
    shared: bool

    @property
    def fix(self) -> str:
        """What a message adds for a run that can do without this data."""
        return how_to_do_without(self.split)


class IndexedBuilder:
    """Builds splits and validation sets from `.bin/.idx` pairs, each pair opened once.

    Args:
        config: the `data` section.
        vocab_size: ids of the model, without padding.
        seed: of the sample order.
        row_format: what is made of end-of-document and padding ids.

    Raises:
        ConfigError: the keys that name files contradict each other or name none.
    """

    def __init__(
        self, config: DataConfig, vocab_size: int, seed: int, row_format: RowFormat
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._seed = seed
        self._row_format = row_format
        self._fim = fill_in_the_middle(config, eod=row_format.eod, vocab_size=vocab_size, seed=seed)
        self._opened: dict[str, IndexedDataset] = {}
        self._weights = parse_split(config.split)
        self._own_paths = {name: getattr(config, f"{name}_paths") for name in SPLIT_NAMES}
        if config.paths and any(self._own_paths.values()):
            raise ConfigError(
                "data.paths (shared out by data.split) and data.train_paths / valid_paths / "
                "test_paths (used whole) are both set; give one or the other"
            )
        if not config.paths and not any(self._own_paths.values()):
            raise ConfigError(
                "data.paths is empty; give the prefix of a .bin/.idx pair (`python -m jaxtron.data "
                "preprocess` makes one), or data.source=synthetic to train on made-up rows"
            )
        for name, paths in config.valid_sets.items():
            if not re.fullmatch(r"[\w.-]+", name):
                raise ConfigError(
                    f"data.valid_sets: {name!r} is not a name; right are letters, digits, '_', "
                    "'-' and '.'"
                )
            if not paths:
                raise ConfigError(
                    f"data.valid_sets.{name} is empty; give the prefix of a .bin/.idx pair or a "
                    "blend, or leave the name out"
                )

    def build(self, split: str, num_samples: int | None) -> RowDataset | None:
        """One split with at least `num_samples` rows; None: every token of it once.

        Returns:
            The dataset; None for a split without a share or, beside `data.valid_sets`, for a
            validation split without files.
        """
        others = split == "valid" and bool(self._config.valid_sets)
        if self._config.paths:
            if self._weights[SPLIT_NAMES.index(split)] == 0:
                if split == "train":
                    raise ConfigError(
                        f"data.split: {self._config.split!r} leaves nothing to train on"
                    )
                if split == "test":
                    raise ConfigError(
                        f"data.split: {self._config.split!r} has no test share"
                        f"{how_to_do_without(split)}"
                    )
                if not others:
                    _log.warning(
                        "data.split %r has no %s share: it is skipped", self._config.split, split
                    )
                return None
            request = _Request(split, "data.paths", num_samples, shared=True)
            return self._build(request, self._config.paths)
        request = _Request(split, f"data.{split}_paths", num_samples, shared=False)
        if self._own_paths[split]:
            return self._build(request, self._own_paths[split])
        if others:
            return None
        count = "all rows" if num_samples is None else f"{num_samples} rows"
        raise ConfigError(f"{request.key} is empty, but the run reads {count} of it{request.fix}")

    def build_valid_sets(self, num_samples: int | None) -> dict[str, RowDataset]:
        """The sets of `data.valid_sets` by name, each as :meth:`build` makes a split."""
        return {
            name: self._build(
                _Request("valid", f"data.valid_sets.{name}", num_samples, shared=False), paths
            )
            for name, paths in self._config.valid_sets.items()
        }

    def _build(self, request: _Request, entries: Sequence[Entry]) -> RowDataset:
        parts, weights = parse_blend(entries, request.key)
        if len(parts) == 1 and not request.shared:  # as in Megatron: its weight has no effect
            weights = None
        drawn = drawn_prefixes(entries, request.key)
        if request.num_samples is None:
            return self._one_after_another(request, drawn)
        if weights is None and len(parts) > 1:  # all prefixes: parsing merges nested plain lists
            return self._exhaustive_blend(request, drawn, request.num_samples)
        self._check_size(request, drawn)
        if weights is not None:
            return self._weighted_blend(request, parts, weights, request.num_samples)
        return self._part(request, parts[0], request.num_samples)

    def _part(self, request: _Request, part: str | list[Any], num_samples: int) -> RowDataset:
        if isinstance(part, str):
            return self._component(request, part, num_samples)
        return self._build(replace(request, num_samples=num_samples), part)

    def _one_after_another(self, request: _Request, prefixes: Sequence[str]) -> RowDataset:
        filled = [prefix for prefix in prefixes if self._num_tokens(request, prefix) > 1]
        if not filled:
            raise self._too_small(request, prefixes[0])
        components = [self._component(request, prefix, None) for prefix in filled]
        if len(components) == 1:
            return components[0]
        indices = concatenated_indices([len(component) for component in components])
        return BlendedDataset(components, indices, f"{request.key} ({request.split})")

    def _weighted_blend(
        self,
        request: _Request,
        parts: Sequence[str | list[Any]],
        weights: Sequence[float],
        num_samples: int,
    ) -> RowDataset:
        plan = plan_weighted_blend(weights, num_samples, self._config.cache_dir)
        components = [
            self._part(request, part, share) if share else None
            for part, share in zip(parts, plan.requests)
        ]
        return BlendedDataset(components, plan.indices, f"blend ({request.split})")

    def _exhaustive_blend(
        self, request: _Request, prefixes: Sequence[str], num_samples: int
    ) -> RowDataset:
        components = [
            self._component(request, prefix, None) if self._num_tokens(request, prefix) else None
            for prefix in prefixes
        ]
        capacities = [0 if component is None else len(component) for component in components]
        if sum(capacities) < num_samples:
            raise DataError(
                f"{request.key}: one epoch of these sets has {sum(capacities)} {request.split} "
                f"rows of {self._config.seq_length} tokens, but the run reads {num_samples}; give "
                "weights, [weight, prefix, …], to read them more than once, or fewer "
                f"steps{request.fix}"
            )
        indices = cached_blend_indices(
            normalize(capacities), num_samples, capacities, self._config.cache_dir
        )
        return BlendedDataset(components, indices, f"blend ({request.split})")

    def _component(self, request: _Request, prefix: str, num_samples: int | None) -> GPTDataset:
        indexed, span = self._open(request, prefix)
        if not self._num_tokens(request, prefix):
            raise self._too_small(request, prefix)
        return GPTDataset(
            indexed,
            span,
            num_samples=num_samples,
            seq_length=self._config.seq_length,
            seed=self._seed,
            vocab_size=self._vocab_size,
            row_format=self._row_format,
            split_name=request.split,
            cache_dir=self._config.cache_dir,
            whole=request.num_samples is None,
            # Evaluation reads documents as they are, so that its loss does not depend on the rate.
            transform=self._fim if request.split == "train" else None,
        )

    def _open(self, request: _Request, prefix: str) -> tuple[IndexedDataset, Span]:
        if prefix not in self._opened:
            self._opened[prefix] = IndexedDataset(prefix)
        indexed = self._opened[prefix]
        if not request.shared:
            return indexed, Span(0, len(indexed))
        return indexed, split_spans(self._weights, len(indexed))[SPLIT_NAMES.index(request.split)]

    def _num_tokens(self, request: _Request, prefix: str) -> int:
        indexed, span = self._open(request, prefix)
        return int(indexed.sequence_lengths[span.start : span.stop].sum(dtype="int64"))

    def _check_size(self, request: _Request, prefixes: Sequence[str]) -> None:
        # A small training split is repeated to fill rows; an evaluation on such rows means little.
        needed = 1 if request.split == "train" else self._config.seq_length + 1
        if sum(self._num_tokens(request, prefix) for prefix in prefixes) < needed:
            raise self._too_small(request, prefixes[0])

    def _too_small(self, request: _Request, prefix: str) -> DataError:
        indexed, span = self._open(request, prefix)
        share = f" with data.split {self._config.split!r}" if request.shared else ""
        needed = 2 if request.num_samples is None else self._config.seq_length + 1
        return DataError(
            f"{prefix}: the {request.split} split is empty or too small: documents [{span.start}, "
            f"{span.stop}) of {len(indexed)}{share}, {self._num_tokens(request, prefix)} tokens, "
            f"and one row needs {needed}; give {request.split} a larger share, add "
            f"documents or lower data.seq_length{request.fix}"
        )
