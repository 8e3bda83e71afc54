"""What a dataset is to the rest of jaxtron, and how one from outside the package is plugged in.

A dataset is anything with a length and random access to rows (:class:`RowDataset`). To train on one
of your own, name a factory in the configuration, `module:function`::

    data:
      source: my_package.my_data:make_rows
      source_options: {folder: /data/dna}
      seq_length: 1024

and write it as::

    def make_rows(split, *, num_samples, seq_length, vocab_size, seed, folder):
        return MyRows(...)      # or None when there is no such split

It is called once for each split that the run needs; `split` is `train`, `valid` or `test`, and
`num_samples` is how many rows the run reads of it, or None for all that there are, once
(`eval.full_validation`). Every process calls it and must get the same
rows in the same order; jaxtron reads only those that belong to the process.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxtron.data.masks import Row, RowFormat
from jaxtron.errors import ConfigError, DataError
from jaxtron.plugins import import_function


@runtime_checkable
class RowDataset(Protocol):
    """Random access to rows, one training sequence each.

    A row is a dict of NumPy arrays: `tokens` and `labels` int32 `[seq]`, `loss_mask` float32
    `[seq]`; with `data.reset_position_ids` also `position_ids` int32 `[seq]`, with
    `data.reset_attention_mask` also `segment_ids` int32 `[seq]`. Reading a row twice gives the same
    row; several threads may read at once.
    """

    name: str

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Row:
        """Row `index`, from 0."""
        ...


class CheckedRows:
    """Rows of a dataset from outside, each checked before it reaches the model.

    Args:
        rows: the dataset; its `name`, if it has one, appears in messages.
        name: name where it has none.
        seq_length: length that every array must have.
        vocab_size: ids of the model.
        row_format: which of the optional arrays must be there.
    """

    def __init__(
        self, rows: Any, *, name: str, seq_length: int, vocab_size: int, row_format: RowFormat
    ) -> None:
        self.name = str(getattr(rows, "name", name))
        self._rows = rows
        self._seq_length = seq_length
        self._vocab_size = vocab_size
        self._dtypes = {
            "tokens": np.dtype(np.int32),
            "labels": np.dtype(np.int32),
            "loss_mask": np.dtype(np.float32),
        }
        if row_format.reset_position_ids:
            self._dtypes["position_ids"] = np.dtype(np.int32)
        if row_format.reset_attention_mask:
            self._dtypes["segment_ids"] = np.dtype(np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        """Row `index`.

        Raises:
            DataError: it has other arrays than :class:`RowDataset` says, or an id outside
                `[0, vocab_size)`.
        """
        row = self._rows[index]
        if not isinstance(row, Mapping) or set(row) != set(self._dtypes):
            got = sorted(row) if isinstance(row, Mapping) else type(row).__name__
            raise DataError(
                f"{self.name}: row {index} is {got}, expected arrays {sorted(self._dtypes)}"
            )
        for key, dtype in self._dtypes.items():
            array = np.asarray(row[key])
            if array.dtype != dtype or array.shape != (self._seq_length,):
                raise DataError(
                    f"{self.name}: {key} of row {index} is {array.dtype} {list(array.shape)}, "
                    f"expected {dtype} [{self._seq_length}]"
                )
        for key in ("tokens", "labels"):
            bad = (row[key] < 0) | (row[key] >= self._vocab_size)
            if np.any(bad):
                at = int(np.argmax(bad))
                raise DataError(
                    f"{self.name}: {key}[{at}] of row {index} is {row[key][at]}, but the model has "
                    f"ids 0 to {self._vocab_size - 1}"
                )
        return dict(row)


def load_custom_source(
    source: str,
    split: str,
    *,
    num_samples: int | None,
    seq_length: int,
    vocab_size: int,
    seed: int,
    row_format: RowFormat,
    options: Mapping[str, Any],
) -> RowDataset | None:
    """Call the factory that `source`, `module:function`, names; see the module's description.

    Raises:
        ConfigError: it has another form, there is no such module or function, or the function
            does not take these arguments.
        DataError: what it returns has no length or no rows.
    """
    factory = import_function("data.source", source, ("indexed", "chat", "synthetic"))
    arguments = {
        "num_samples": num_samples,
        "seq_length": seq_length,
        "vocab_size": vocab_size,
        "seed": seed,
    }
    if taken := sorted(arguments.keys() & options.keys()):
        raise ConfigError(
            f"data.source_options: {', '.join(taken)} comes from other keys of the configuration "
            f"({source} gets num_samples, seq_length, vocab_size and seed in any case)"
        )
    arguments |= options
    try:
        inspect.signature(factory).bind(split, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"data.source {source} cannot be called with {', '.join(arguments)}: {error}; "
            "data.source_options holds its own arguments"
        ) from error
    rows = factory(split, **arguments)
    if rows is None:
        return None
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise DataError(
            f"{source}: returned {type(rows).__name__}, expected a dataset with a length and "
            "random access, as jaxtron.data.source.RowDataset describes"
        )
    try:
        len(rows)
    except TypeError as error:
        asked = "; eval.full_validation asks for all rows: num_samples=None"
        raise DataError(
            f"{source}: the {split} dataset has no length: {error}"
            f"{asked if num_samples is None else ''}"
        ) from error
    return CheckedRows(
        rows,
        name=f"{source} ({split})",
        seq_length=seq_length,
        vocab_size=vocab_size,
        row_format=row_format,
    )
