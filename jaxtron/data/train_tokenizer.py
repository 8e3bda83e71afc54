"""The command ``python -m jaxtron.data train-tokenizer``; the training is ``train_bpe``."""

import argparse
import errno
import os
import tempfile
from pathlib import Path

from jaxtron.data.documents import read_texts
from jaxtron.data.tokenizers import train_bpe
from jaxtron.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="JSON Lines files (plain, gzip or Zstandard) or folders of text files",
    )
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="V", help="entries, at least 257"
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="PATH",
        help="a folder for tokenizer.json and tokenizer_config.json, or one *.json file",
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="key that holds the text (default: text)"
    )
    parser.add_argument(
        "--suffixes",
        nargs="+",
        default=[".txt"],
        metavar="SUFFIX",
        help="endings of the files to take from folders (default: .txt)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")


def run(args: argparse.Namespace) -> int:
    """Run the command and say what came out.

    Raises:
        ConfigError: a tokenizer is at ``--output`` already, and ``--overwrite`` is not given; or
            nothing can be written there.
    """
    folder = Path(args.output)
    file = folder if folder.suffix == ".json" else folder / "tokenizer.json"
    if file.exists() and not args.overwrite:
        raise ConfigError(
            f"output {file} exists already: choose another --output, or replace it with --overwrite"
        )
    _refuse_unwritable(file)
    texts = read_texts(args.input, args.json_key, args.suffixes)
    tokenizer = train_bpe(texts, args.vocab_size, args.output)
    print(f"{args.output}: vocab_size={tokenizer.vocab_size} eod={tokenizer.eod}")
    if tokenizer.vocab_size < args.vocab_size:
        print(f"fewer entries than the {args.vocab_size} asked for: the text has no more pairs")
    return 0


def _refuse_unwritable(file: Path) -> None:
    """Find out before the training, which takes long, whether its result can be written.

    Raises:
        ConfigError: ``file`` or its folder cannot be made.
    """
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder = next(parent for parent in file.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"output {file} cannot be written: {error.strerror}; choose another --output"
        ) from None
