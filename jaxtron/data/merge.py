"""Joining indexed datasets: ``python -m jaxtron.data merge``.

The result equals, byte for byte, one dataset built from the inputs of all parts in order.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxtron.data.indexed import IndexedDataset, IndexedDatasetWriter
from jaxtron.data.preprocess import check_output
from jaxtron.errors import ConfigError, DataError


def merge(
    prefixes: Sequence[str | Path], output_prefix: str | Path, *, overwrite: bool = False
) -> IndexedDataset:
    """Write the documents of all ``prefixes``, in this order, as one dataset; returns it opened.

    A part without documents adds nothing.

    Raises:
        ConfigError: no part, an output that exists, or an output that is one of the parts.
        DataError: a part is missing or damaged, is multimodal, or the token dtypes differ.
            All parts are checked before anything is written.
    """
    if not prefixes:
        raise ConfigError("no input: give the prefixes of the datasets to merge")
    for prefix in prefixes:
        if Path(prefix).resolve() == Path(output_prefix).resolve():
            raise ConfigError(f"output {output_prefix} is also an input; choose another prefix")
    check_output(output_prefix, overwrite)
    first = IndexedDataset(prefixes[0])
    for prefix in prefixes[1:]:
        part = IndexedDataset(prefix)
        if part.dtype != first.dtype:
            raise DataError(
                f"{part.prefix} stores {part.dtype.name} tokens and {first.prefix} "
                f"{first.dtype.name}: datasets to merge need one dtype, that is, one tokenizer; "
                "preprocess one of them again"
            )
    try:
        with IndexedDatasetWriter(output_prefix, first.dtype) as writer:
            for prefix in prefixes:
                writer.add_index(prefix)
    except OSError as error:
        raise DataError(f"writing {output_prefix} failed: {error}") from error
    return IndexedDataset(output_prefix)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="datasets to join, in this order: their paths without .bin and .idx",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")


def run(args: argparse.Namespace) -> int:
    """Run the command and print what was written."""
    merged = merge(args.input, args.output_prefix, overwrite=args.overwrite)
    print(
        f"{merged.prefix}: documents={merged.num_documents} sequences={len(merged)} "
        f"tokens={merged.num_tokens} dtype={merged.dtype.name} parts={len(args.input)}"
    )
    return 0
