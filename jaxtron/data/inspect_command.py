"""The command ``python -m jaxtron.data inspect``: a dataset of token ids, or conversations."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxtron.config.yaml_io import parse_yaml
from jaxtron.data.chat import TEMPLATES, ChatTemplate, chat_template
from jaxtron.data.config import DataConfig
from jaxtron.data.indexed import idx_path
from jaxtron.data.inspect import inspect
from jaxtron.data.inspect_chat import inspect_chats
from jaxtron.data.inspect_page import page
from jaxtron.data.packing import PACKINGS
from jaxtron.data.tokenizers import load_tokenizer
from jaxtron.errors import ConfigError, DataError

_DATASET_OPTIONS = ("vocab_size", "html")
_CHAT_OPTIONS = ("chat_template", "seq_length", "packing")
_TEXTS = """'{header: "[{role}] ", end: "</s>"}'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a dataset's path without .bin and .idx; or JSON Lines files of conversations "
        "(*.jsonl, plain, gzip or Zstandard), as data.source chat reads them",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="SPEC",
        help="'byte', a tokenizer.json, a folder holding one, or a SentencePiece *.model; of a "
        "dataset: decode the samples and check the ids against its vocabulary; conversations "
        "need it",
    )
    parser.add_argument(
        "--samples", type=int, default=3, metavar="K", help="documents to show (default: 3)"
    )
    dataset = parser.add_argument_group("of a dataset")
    dataset.add_argument(
        "--vocab-size",
        type=int,
        metavar="V",
        help="check the ids against 0 to V-1; exit status 2 if one is outside",
    )
    dataset.add_argument("--html", metavar="FILE", help="also write the report as a page")
    chats = parser.add_argument_group("of conversations")
    chats.add_argument(
        "--chat-template",
        metavar="TEMPLATE",
        help=f"{', '.join(TEMPLATES)}, or the texts as YAML or JSON, {_TEXTS} "
        f"(default: {DataConfig.chat_template})",
    )
    chats.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help="count the documents that are longer than a row of N tokens",
    )
    chats.add_argument(
        "--packing",
        choices=tuple(PACKINGS),
        help="also count the rows that this data.packing fills (first_fit: in the order of the "
        "file; a run shuffles)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command on what the paths name.

    Raises:
        ConfigError: an option cannot work, or not with paths of this kind.
        DataError: a file is missing or damaged.
    """
    if args.samples < 0:
        raise ConfigError(f"--samples {args.samples}: give 0 or more")
    if all(_is_text(path) for path in args.paths):
        return _run_chats(args)
    if len(args.paths) > 1:
        raise ConfigError(
            f"{' '.join(args.paths)}: give one dataset (a path without .bin and .idx), or JSON "
            "Lines files of conversations alone"
        )
    return _run_dataset(args)


def _is_text(path: str) -> bool:
    """Whether a path is for JSON Lines: named so or there, and not the prefix of a dataset."""
    if idx_path(path).is_file():
        return False
    there = Path(path).exists() and not path.endswith((".bin", ".idx"))
    return there or ".jsonl" in Path(path).name


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}")


def _run_dataset(args: argparse.Namespace) -> int:
    """Print the report, write the page, then fail if ids are out of range."""
    (prefix,) = args.paths
    _refuse(
        args,
        _CHAT_OPTIONS,
        f"for JSON Lines files of conversations alone; {prefix} is the prefix of a dataset "
        "(.bin/.idx)",
    )
    if args.vocab_size is not None and args.vocab_size < 1:
        raise ConfigError(f"--vocab-size {args.vocab_size}: give 1 or more")
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer is not None else None
    report = inspect(prefix, tokenizer=tokenizer, vocab_size=args.vocab_size, samples=args.samples)
    print(report.text())
    if args.html is not None:
        try:
            Path(args.html).write_text(page(report), encoding="utf-8")
        except OSError as error:
            raise DataError(f"--html {args.html} cannot be written: {error.strerror}") from error
        print(f"page: {args.html}")
    if report.num_bad_ids:
        raise DataError(
            f"{report.num_bad_ids} of {report.tokens} ids are out of range:\n"
            + "\n".join(report.bad_id_lines())
        )
    return 0


def _run_chats(args: argparse.Namespace) -> int:
    names = ", ".join(args.paths)
    _refuse(
        args,
        _DATASET_OPTIONS,
        f"for a dataset (.bin/.idx) alone; {names} is read as JSON Lines of conversations",
    )
    if args.tokenizer is None:
        raise ConfigError(
            f"{names} is read as JSON Lines of conversations, which are tokens only with a "
            "tokenizer: give --tokenizer"
        )
    if args.seq_length is not None and args.seq_length < 1:
        raise ConfigError(f"--seq-length {args.seq_length}: give 1 or more")
    if args.packing is not None and args.seq_length is None:
        raise ConfigError(f"--packing {args.packing} needs the length of a row: give --seq-length")
    report = inspect_chats(
        args.paths,
        _template(args.chat_template),
        load_tokenizer(args.tokenizer),
        seq_length=args.seq_length,
        packing=args.packing,
        samples=args.samples,
    )
    print(report.text())
    return 0


def _template(given: str | None) -> ChatTemplate:
    """The template of ``--chat-template``.

    Raises:
        ConfigError: it is neither a name nor a mapping of texts.
    """
    option = "--chat-template"
    value = DataConfig.chat_template if given is None else parse_yaml(given, option)
    texts = [t for pair in value.items() for t in pair] if isinstance(value, dict) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"{option} {given}: give {' or '.join(TEMPLATES)}, or the texts as {_TEXTS}"
        )
    return chat_template(value, option)
