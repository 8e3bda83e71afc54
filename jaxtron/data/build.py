"""From the configuration to the train, valid and test datasets of a run."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxtron.data.build_indexed import IndexedBuilder
from jaxtron.data.chat_dataset import ChatBuilder
from jaxtron.data.config import DataConfig
from jaxtron.data.masks import RowFormat
from jaxtron.data.source import RowDataset, load_custom_source
from jaxtron.data.split import SPLIT_NAMES, how_to_do_without
from jaxtron.data.synthetic import SyntheticDataset
from jaxtron.data.tokenizers import load_tokenizer
from jaxtron.errors import ConfigError, DataError


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run; None for a split that the run does not use.

    `valid_sets` are the further validation sets by name, in the order of the configuration.
    """

    train: RowDataset | None = None
    valid: RowDataset | None = None
    test: RowDataset | None = None
    valid_sets: Mapping[str, RowDataset] = field(default_factory=dict)


def build_datasets(
    config: DataConfig,
    *,
    vocab_size: int,
    seed: int,
    train_samples: int,
    valid_samples: int | None,
    test_samples: int | None,
) -> Datasets:
    """Open and check everything that the run will read.

    Every process calls this and gets the same datasets; there is no communication.

    Args:
        config: the `data` section.
        vocab_size: ids of the model, without padding.
        seed: of the sample order, in `[0, 2^32)`.
        train_samples: rows that the run reads; 0: the split is not built.
        valid_samples: the same for each validation set; None: every token of it once, in the
            order of the files.
        test_samples: the same for the test set.

    Returns:
        The datasets. Each has at least as many rows as asked for. A validation split whose share
        in `data.split` is zero is None, with a warning when rows were asked for; so is, without
        one, the validation split where there are other `data.valid_sets`.

    Raises:
        ConfigError: keys that are wrong or contradict each other.
        DataError: files that are missing or damaged, or a split that has no data.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"train.seed is {seed}; the data order needs one in [0, 2^32)")
    samples = dict(zip(SPLIT_NAMES, (train_samples, valid_samples, test_samples)))
    if config.source == "chat":
        for name in ("source_options", "valid_sets", "fim_rate"):
            _refuse(config, name, "does not go with conversations")
        chat = ChatBuilder(config, vocab_size, seed)
        splits = {name: chat.build(name, n) for name, n in samples.items() if n != 0}
        return Datasets(**splits, valid_sets={})
    for name in ("packing", "overlong", "chat_template"):
        default = DataConfig.__dataclass_fields__[name].default
        if getattr(config, name) != default:
            _refuse(config, name, "is read by the source 'chat' alone")
    row_format = _row_format(config, vocab_size)
    if config.source == "indexed":
        _refuse(config, "source_options", "is for a source of your own")
        builder = IndexedBuilder(config, vocab_size, seed, row_format)
        splits = {name: builder.build(name, n) for name, n in samples.items() if n != 0}
        sets = builder.build_valid_sets(valid_samples) if valid_samples != 0 else {}
        return Datasets(**splits, valid_sets=sets)
    if config.source == "synthetic":
        _refuse(config, "source_options", "is for a source of your own")
    _refuse(config, "fim_rate", "rearranges the rows of .bin/.idx pairs alone")
    for name in ("paths", "train_paths", "valid_paths", "test_paths", "valid_sets"):
        _refuse(config, name, "names .bin/.idx pairs, which only the source 'indexed' reads")
    datasets: dict[str, RowDataset | None] = {}
    for name, count in samples.items():
        if count == 0:
            continue
        make: Callable[..., RowDataset | None]
        if config.source == "synthetic":
            make = SyntheticDataset
        else:
            make = functools.partial(
                load_custom_source, config.source, options=config.source_options
            )
        datasets[name] = make(
            name,
            num_samples=count,
            seq_length=config.seq_length,
            vocab_size=vocab_size,
            seed=seed,
            row_format=row_format,
        )
        if datasets[name] is None:
            raise DataError(
                f"data.source {config.source} has no {name} split, but the run reads "
                f"{'all' if count is None else count} rows of it{how_to_do_without(name)}"
            )
    return Datasets(
        train=datasets.get("train"), valid=datasets.get("valid"), test=datasets.get("test")
    )


def _refuse(config: DataConfig, name: str, reason: str) -> None:
    if getattr(config, name):
        raise ConfigError(f"data.{name} {reason}; data.source is {config.source!r}")


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
