"""``python -m jaxtron.data preprocess | merge | inspect | train-tokenizer``."""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

from jaxtron.data import inspect_command, merge, preprocess, train_tokenizer


class Command(NamedTuple):
    """One subcommand: its options, its action, a line of help and an example."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    summary: str
    example: str


_COMMANDS = {
    "preprocess": Command(
        preprocess.add_arguments,
        preprocess.run,
        "Tokenize JSON Lines files or folders of text into Megatron's .bin/.idx.",
        "jaxtron data preprocess --input part1.jsonl part2.jsonl.gz "
        "--tokenizer llama3/ --append-eod --workers 16 --output-prefix data/corpus",
    ),
    "merge": Command(
        merge.add_arguments,
        merge.run,
        "Join datasets into one, as if it had been built in one go.",
        "jaxtron data merge --input data/a_text_document data/b_text_document "
        "--output-prefix data/all_text_document",
    ),
    "inspect": Command(
        inspect_command.add_arguments,
        inspect_command.run,
        "Show sizes, document lengths, ids out of range and decoded samples of a dataset; of "
        "conversations, what fine-tuning will train.",
        "jaxtron data inspect data/corpus_text_document --tokenizer llama3/ --html corpus.html; or "
        "jaxtron data inspect chats.jsonl --tokenizer llama3/ --chat-template llama3",
    ),
    "train-tokenizer": Command(
        train_tokenizer.add_arguments,
        train_tokenizer.run,
        "Train a byte-level BPE tokenizer on text.",
        "jaxtron data train-tokenizer --input corpus.jsonl --vocab-size 8192 --output tokenizer/",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; errors a user can act on are raised as ``JaxtronError``."""
    parser = argparse.ArgumentParser(
        prog="jaxtron data",
        description="Prepare and look into training data.",
        epilog=f"example: {_COMMANDS['preprocess'].example}",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        command.add_arguments(
            commands.add_parser(
                name,
                help=command.summary,
                description=command.summary,
                epilog=f"example: {command.example}",
            )
        )
    args = parser.parse_args(argv)
    return _COMMANDS[args.command].run(args)


if __name__ == "__main__":
    from jaxtron.cli import run

    sys.exit(run(main))
