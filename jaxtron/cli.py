"""``jaxtron <verb>``: the console script, and what all verbs share.

Each verb is a module that also runs as ``python -m jaxtron.<verb>``; it is imported only when asked
for, so ``jaxtron --help`` needs neither JAX nor a device.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence

import jaxtron
from jaxtron.errors import JaxtronError
from jaxtron.nearest import nearest

VERBS = {
    "train": "train a model: jaxtron train --config FILE [section.key=value ...]",
    "quickstart": "train and sample a small model on text that is on this machine",
    "generate": "continue a text with a trained model",
    "data": "preprocess, merge and inspect token datasets",
    "mesh": "show the device mesh and how every parameter is split over it",
    "checkpoint": "list, show, verify and prune checkpoints",
    "observe": "write a report page of a run",
    "bench": "measure the speed of the training step",
}
"""Verb -> one line of help; the code is in the module ``jaxtron.<verb>``."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else EXIT_USER_ERROR
    verb, *rest = arguments
    if verb == "--version":
        print(_version())
        return 0
    if verb not in VERBS:
        print(f"error: no verb {verb!r}: {nearest(verb, VERBS)}", file=sys.stderr)
        return EXIT_USER_ERROR
    return run(_verb_main(verb), rest)


def run(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> int:
    """Call a verb's ``main`` and turn what a user can fix into a message and an exit status.

    Args:
        main: takes the arguments after the verb (None: those of the process), returns the status.
        argv: passed to ``main``.

    Returns:
        the status of ``main``; 2 after an error that is the user's to fix, such as a file that the
        system refuses, 130 when interrupted, 141 when the reader of the output has gone.
    """
    try:
        return main(argv)
    except JaxtronError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.filename is None:
            raise
        print(
            f"error: {error.filename}: {error.strerror}; see that it is there and that this "
            "process may use it",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR


def parse_with_overrides(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> argparse.Namespace:
    """Parse arguments of a verb that takes ``section.key=value`` anywhere among its options.

    argparse itself accepts positional arguments in one run only. The parser declares them as
    ``overrides``; those that stand elsewhere are added to it.
    """
    args, rest = parser.parse_known_args(argv)
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    args.overrides = [*args.overrides, *rest]
    return args


def at_least(smallest: int, kind: type[float] = int) -> Callable[[str], float]:
    """A command-line argument's type: a number of some kind that is not below ``smallest``."""

    def number(text: str) -> float:
        value = kind(text)
        if not value >= smallest:  # also NaN
            raise argparse.ArgumentTypeError(f"it is {text}: give {smallest} or more")
        return value

    return number


def _verb_main(verb: str) -> Callable[[list[str] | None], int]:
    name = f"jaxtron.{verb}"
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
    return importlib.import_module(name).main


def _help() -> str:
    lines = ["usage: jaxtron VERB [...]      (also: python -m jaxtron.VERB)", ""]
    lines += [f"  {verb:<12}{text}" for verb, text in VERBS.items()]
    lines += [
        "",
        "jaxtron VERB --help shows a verb's options and an example; --version the versions.",
    ]
    return "\n".join(lines)


def _version() -> str:
    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax"))
    return f"jaxtron {jaxtron.__version__} ({libraries}, Python {platform.python_version()})"


if __name__ == "__main__":
    raise SystemExit(main())
