"""From the configuration to the train, valid and test datasets of a run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtron.data.blend import (
    BlendedDataset,
    cached_blend_indices,
    normalize,
    parse_blend,
    plan_weighted_blend,
)
from jaxtron.data.config import DataConfig
from jaxtron.data.gpt import GPTDataset
from jaxtron.data.indexed import IndexedDataset
from jaxtron.data.masks import RowFormat
from jaxtron.data.source import RowDataset, load_custom_source
from jaxtron.data.split import SPLIT_NAMES, Span, parse_split, split_spans
from jaxtron.data.synthetic import SyntheticDataset
from jaxtron.data.tokenizers import load_tokenizer
from jaxtron.errors import ConfigError, DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run; None for a split that the run does not use."""

    train: RowDataset | None = None
    valid: RowDataset | None = None
    test: RowDataset | None = None


def requested_samples(
    *, steps: int, global_batch_size: int, eval_interval: int, eval_iters: int
) -> tuple[int, int, int]:
    """Rows that a run reads of train, valid and test, as Megatron counts them.

    Evaluation runs every `eval_interval` steps and once after the last one, on `eval_iters` global
    batches that differ from one evaluation to the next; `eval_interval` 0 means never.
    """
    evaluations = steps // eval_interval + 1 if eval_interval else 0
    one_evaluation = eval_iters * global_batch_size
    test = one_evaluation if eval_interval else 0
    return steps * global_batch_size, evaluations * one_evaluation, test


def build_datasets(
    config: DataConfig,
    *,
    vocab_size: int,
    seed: int,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
) -> Datasets:
    """Open and check everything that the run will read.

    Every process calls this and gets the same datasets; there is no communication.

    Args:
        config: the `data` section.
        vocab_size: ids of the model, without padding.
        seed: of the sample order, in `[0, 2^32)`.
        train_samples: rows that the run reads; 0: the split is not built.
        valid_samples: the same for validation.
        test_samples: the same for the test set.

    Returns:
        The datasets. Each has at least as many rows as asked for. A split whose share in
        `data.split` is zero is None, with a warning when rows were asked for.

    Raises:
        ConfigError: keys that are wrong or contradict each other.
        DataError: files that are missing or damaged, or a split that has no data.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"train.seed is {seed}; the data order needs one in [0, 2^32)")
    samples = dict(zip(SPLIT_NAMES, (train_samples, valid_samples, test_samples)))
    row_format = _row_format(config, vocab_size)
    if config.source == "indexed":
        builder = _IndexedBuilder(config, vocab_size, seed, row_format)
        return Datasets(**{name: builder.build(name, n) for name, n in samples.items() if n})
    if config.source == "synthetic":
        _refuse(config, "source_options", "is for a source of your own")
    elif ":" not in config.source:
        raise ConfigError(
            f"data.source is {config.source!r}; expected 'indexed', 'synthetic', or "
            "'module:function' of your own"
        )
    for name in ("paths", "train_paths", "valid_paths", "test_paths"):
        _refuse(config, name, "names .bin/.idx pairs, which only the source 'indexed' reads")
    datasets: dict[str, RowDataset | None] = {}
    for name, count in samples.items():
        if not count:
            continue
        if config.source == "synthetic":
            datasets[name] = SyntheticDataset(
                name,
                num_samples=count,
                seq_length=config.seq_length,
                vocab_size=vocab_size,
                seed=seed,
                row_format=row_format,
            )
            continue
        datasets[name] = load_custom_source(
            config.source,
            name,
            num_samples=count,
            seq_length=config.seq_length,
            vocab_size=vocab_size,
            seed=seed,
            row_format=row_format,
            options=config.source_options,
        )
        if datasets[name] is None:
            raise DataError(
                f"data.source {config.source} has no {name} split, but the run reads {count} rows "
                f"of it{_fix(name)}"
            )
    return Datasets(**datasets)


def _refuse(config: DataConfig, name: str, reason: str) -> None:
    if getattr(config, name):
        raise ConfigError(f"data.{name} {reason}; data.source is {config.source!r}")


def _fix(split: str) -> str:
    return "; to train without evaluation set eval.iters=0" if split == "valid" else ""


def _row_format(config: DataConfig, vocab_size: int) -> RowFormat:
    eod, pad = config.eod_token, None
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
        if tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"data.tokenizer {config.tokenizer} has {tokenizer.vocab_size} ids, but "
                f"model.vocab_size is {vocab_size}; set it to at least {tokenizer.vocab_size}"
            )
        eod = tokenizer.eod if eod is None else eod
        # Where padding and end of document are one id, masking it would leave eod untrained.
        pad = None if tokenizer.pad in (eod, tokenizer.eod) else tokenizer.pad
    switches = {
        name: getattr(config, name)
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    }
    if eod is None and any(switches.values()):
        on = ", ".join(f"data.{name}" for name, value in switches.items() if value)
        raise ConfigError(
            f"{on}: needs the id that ends a document; set data.eod_token, or data.tokenizer to a "
            "tokenizer that has one"
        )
    if eod is not None and eod >= vocab_size:
        raise ConfigError(f"data.eod_token is {eod}, but model.vocab_size is {vocab_size}")
    return RowFormat(eod=eod, pad=pad, **switches)


class _IndexedBuilder:
    """Builds splits from `.bin/.idx` pairs, each pair opened once."""

    def __init__(
        self, config: DataConfig, vocab_size: int, seed: int, row_format: RowFormat
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._seed = seed
        self._row_format = row_format
        self._opened: dict[str, IndexedDataset] = {}
        self._weights = parse_split(config.split)
        _refuse(config, "source_options", "is for a source of your own")
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

    def build(self, split: str, num_samples: int) -> RowDataset | None:
        """The dataset of one split with at least `num_samples` rows."""
        if not self._config.paths:
            if not self._own_paths[split]:
                raise ConfigError(
                    f"data.{split}_paths is empty, but the run reads {num_samples} rows of "
                    f"it{_fix(split)}"
                )
            key = f"data.{split}_paths"
            prefixes, weights = parse_blend(self._own_paths[split], key)
            if len(prefixes) == 1:  # as in Megatron, where a weight then has no effect
                weights = None
        else:
            if self._weights[SPLIT_NAMES.index(split)] == 0:
                if split == "train":
                    raise ConfigError(
                        f"data.split: {self._config.split!r} leaves nothing to train on"
                    )
                _log.warning(
                    "data.split %r has no %s share: it is skipped", self._config.split, split
                )
                return None
            key = "data.paths"
            prefixes, weights = parse_blend(self._config.paths, key)
        if weights is None and len(prefixes) > 1:
            return self._exhaustive_blend(split, prefixes, num_samples, key)
        drawn = [p for p, w in zip(prefixes, weights or [1.0]) if w > 0]
        self._check_size(split, drawn)
        if weights is not None:
            return self._weighted_blend(split, prefixes, weights, num_samples)
        return self._component(split, prefixes[0], num_samples)

    def _weighted_blend(
        self, split: str, prefixes: Sequence[str], weights: Sequence[float], num_samples: int
    ) -> RowDataset:
        plan = plan_weighted_blend(weights, num_samples, self._config.cache_dir)
        components = [
            self._component(split, prefix, request) if request else None
            for prefix, request in zip(prefixes, plan.requests)
        ]
        return BlendedDataset(components, plan.indices, f"blend ({split})")

    def _exhaustive_blend(
        self, split: str, prefixes: Sequence[str], num_samples: int, key: str
    ) -> RowDataset:
        components = [
            self._component(split, prefix, None) if self._num_tokens(split, prefix) else None
            for prefix in prefixes
        ]
        capacities = [0 if component is None else len(component) for component in components]
        if sum(capacities) < num_samples:
            raise DataError(
                f"{key}: one epoch of these sets has {sum(capacities)} {split} rows of "
                f"{self._config.seq_length} tokens, but the run reads {num_samples}; give weights, "
                f"[weight, prefix, …], to read them more than once, or fewer steps{_fix(split)}"
            )
        indices = cached_blend_indices(
            normalize(capacities), num_samples, capacities, self._config.cache_dir
        )
        return BlendedDataset(components, indices, f"blend ({split})")

    def _component(self, split: str, prefix: str, num_samples: int | None) -> GPTDataset:
        indexed, span = self._open(split, prefix)
        if not self._num_tokens(split, prefix):
            raise self._too_small(split, prefix)
        return GPTDataset(
            indexed,
            span,
            num_samples=num_samples,
            seq_length=self._config.seq_length,
            seed=self._seed,
            vocab_size=self._vocab_size,
            row_format=self._row_format,
            split_name=split,
            cache_dir=self._config.cache_dir,
        )

    def _open(self, split: str, prefix: str) -> tuple[IndexedDataset, Span]:
        if prefix not in self._opened:
            self._opened[prefix] = IndexedDataset(prefix)
        indexed = self._opened[prefix]
        if not self._config.paths:
            return indexed, Span(0, len(indexed))
        return indexed, split_spans(self._weights, len(indexed))[SPLIT_NAMES.index(split)]

    def _num_tokens(self, split: str, prefix: str) -> int:
        indexed, span = self._open(split, prefix)
        return int(indexed.sequence_lengths[span.start : span.stop].sum(dtype="int64"))

    def _check_size(self, split: str, prefixes: Sequence[str]) -> None:
        # A small training split is repeated to fill rows; an evaluation on such rows means little.
        needed = 1 if split == "train" else self._config.seq_length + 1
        if sum(self._num_tokens(split, prefix) for prefix in prefixes) < needed:
            raise self._too_small(split, prefixes[0])

    def _too_small(self, split: str, prefix: str) -> DataError:
        indexed, span = self._open(split, prefix)
        share = f" with data.split {self._config.split!r}" if self._config.paths else ""
        return DataError(
            f"{prefix}: the {split} split is empty or too small: documents [{span.start}, "
            f"{span.stop}) of {len(indexed)}{share}, {self._num_tokens(split, prefix)} tokens, and "
            f"one row needs {self._config.seq_length + 1}; give {split} a larger share, add "
            f"documents or lower data.seq_length{_fix(split)}"
        )
