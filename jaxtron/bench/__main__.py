"""``python -m jaxtron.bench step | profile | matrix``: time training steps, say where time goes."""

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxtron.bench.breakdown import breakdown, by_device, kernels_of, read_trace
from jaxtron.bench.matrix import Outcome, read_matrix, read_results, run_matrix, table
from jaxtron.bench.matrix import __doc__ as matrix_help
from jaxtron.bench.scopes import COMMAND_BUFFERS, ScopeTimes, read_step_text, scope_times
from jaxtron.bench.step import DocumentLengths, StepTiming, time_step
from jaxtron.bench.timeline import measured_timeline
from jaxtron.cli import at_least, parse_with_overrides, run
from jaxtron.config.config import Config
from jaxtron.config.load import load_config
from jaxtron.config.reads import check_reads
from jaxtron.config.validate import validate
from jaxtron.errors import ConfigError
from jaxtron.launch.initialize import launch, shutdown
from jaxtron.mesh.timeline import Timeline, make_timeline
from jaxtron.observe.plots import rates_plot

EXAMPLE = """examples:
  python -m jaxtron.bench step --config configs/llama3_8b.yaml --steps 5 --json out.json \\
      model.num_layers=8 data.seq_length=4096 train.global_batch_size=16
  python -m jaxtron.bench profile --config configs/llama3_8b.yaml --top 20 model.num_layers=8
  python -m jaxtron.bench profile --config configs/llama3_8b.yaml --scopes model.num_layers=8
  python -m jaxtron.bench step --config configs/llama3_8b.yaml --documents 4096 1.2 \\
      data.seq_length=65536 model.max_position_embeddings=65536 parallel.context=4 \\
      parallel.dynamic_context=true
  python -m jaxtron.bench profile --read runs/llama/profile --traced-steps 3
  python -m jaxtron.bench profile --config configs/llama3_8b.yaml --timeline step.svg \\
      --traced-steps 1 model.num_layers=8 parallel.pipeline=2 parallel.fsdp=1
  python -m jaxtron.bench matrix configs/bench/h100_x4.yaml --output results
"""


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark; prints one line, and writes JSON when asked."""
    parser = argparse.ArgumentParser(
        prog="jaxtron bench",
        description="Measure training steps.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("step", "time whole optimizer steps on random tokens"),
        ("profile", "time steps, then break one GPU's time down by kind, from a profile"),
    ):
        sub = verbs.add_parser(
            verb,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--config", metavar="FILE", help="YAML file or preset")
        sub.add_argument("--name", default="step", help="name of the case in the output")
        sub.add_argument("--steps", type=at_least(1), default=5, help="timed steps")
        sub.add_argument("--warmup", type=at_least(0), default=2, help="steps before, not counted")
        sub.add_argument(
            "--documents",
            type=at_least(0, float),
            nargs=2,
            metavar=("MEDIAN", "SIGMA"),
            help="rows of documents of log-normal length, cut at data.seq_length",
        )
        sub.add_argument("--padded", action="store_true", help="one of --documents in every row")
        sub.add_argument("--json", type=Path, help="append the result to this file, a JSON line")
        if verb == "profile":
            sub.add_argument("--trace", type=Path, help="keep the trace in this folder")
            sub.add_argument(
                "--traced-steps", type=at_least(1), default=2, help="steps in the trace"
            )
            sub.add_argument(
                "--top", type=at_least(0), default=0, help="also list the longest kernels"
            )
            sub.add_argument(
                "--scopes",
                action="store_true",
                help="also break it down by part of the model, forward and backward apart",
            )
            sub.add_argument("--read", type=Path, help="break down this trace instead of a run")
            sub.add_argument(
                "--timeline",
                type=Path,
                metavar="SVG",
                help="of a pipeline: draw the schedule and one traced step, one above the other",
            )
        sub.add_argument("overrides", nargs="*", metavar="section.key=value")
    matrix = verbs.add_parser(
        "matrix",
        help="run the cases of a file, each in a process of its own, and write a table",
        description=matrix_help,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    matrix.add_argument("file", type=Path, metavar="FILE", help="YAML, see above")
    matrix.add_argument(
        "--output",
        type=Path,
        metavar="PREFIX",
        help="writes PREFIX.jsonl, PREFIX.md and a plot, PREFIX.svg",
    )
    matrix.add_argument(
        "--timeout", type=at_least(1, float), default=600, help="seconds a case may take"
    )
    matrix.add_argument(
        "--resume",
        action="store_true",
        help="go on with the results in PREFIX.jsonl: run the cases that have none yet, or failed, "
        "or have other settings now",
    )
    matrix.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="for all cases, after their own"
    )
    args = parse_with_overrides(parser, argv)
    # force: libraries imported above may have set up logging already.
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    for noisy in ("absl", "jax", "orbax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if args.verb == "matrix":
        return _matrix(args)
    _check_folder(args.json, "--json")
    _check_folder(getattr(args, "timeline", None), "--timeline")
    drawn = _timeline(args)
    if args.verb == "step":
        _record(args, _time(args, None), None)
    elif args.read is not None:
        if drawn is None and (args.config or args.overrides):
            raise ConfigError(
                f"--read breaks down the trace in {args.read}, of which --config and overrides say "
                "nothing without --timeline: leave them out, or leave out --read"
            )
        _record(args, None, _print_breakdown(args.read, args, drawn))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.trace or Path(scratch)
            if (timing := _time(args, folder)) is not None:
                _record(args, timing, _print_breakdown(folder, args, drawn))
    return 0


def _record(args: argparse.Namespace, timing: StepTiming | None, scopes: ScopeTimes | None) -> None:
    """Append what was measured to the file of ``--json``."""
    found: dict[str, Any] = {} if timing is None else dataclasses.asdict(timing)
    if scopes is not None:
        found = {"name": args.name, **found, "scopes": scopes.to_dict(args.traced_steps)}
    if args.json is not None and found:
        with args.json.open("a") as file:
            file.write(json.dumps(found) + "\n")


def _timeline(args: argparse.Namespace) -> Timeline | None:
    """The schedule to draw, if one is asked for."""
    if getattr(args, "timeline", None) is None:
        return None
    if args.traced_steps != 1:
        raise ConfigError(
            f"--timeline draws one step, but --traced-steps is {args.traced_steps}: give "
            "--traced-steps 1"
        )
    config = load_config(args.config, ["data.source=synthetic", *args.overrides])
    return make_timeline(config, validate(config, config.parallel.pipeline))


def _matrix(args: argparse.Namespace) -> int:
    cases = read_matrix(args.file)
    _check_folder(args.output, "--output")
    prefix = args.output or args.file.with_suffix("")
    json_file, table_file, plot_file = (Path(f"{prefix}.{end}") for end in ("jsonl", "md", "svg"))
    for file in (json_file, table_file, plot_file):
        if file.exists() and not (args.resume and json_file.exists()):
            raise ConfigError(
                f"{file} exists: go on with its results by --resume ({json_file}), move it away, "
                "or give another --output"
            )
    if json_file.exists():
        read_results(json_file)
    outcomes: list[Outcome] = []
    before = signal.signal(signal.SIGTERM, _end)
    try:
        for outcome in run_matrix(
            cases,
            json_file,
            overrides=args.overrides,
            timeout_s=args.timeout,
            report=lambda line: print(line, flush=True),
        ):
            outcomes.append(outcome)
    finally:
        signal.signal(signal.SIGTERM, before)
        names = [case.name for case in cases.cases[len(outcomes) :]]
        outcomes += [Outcome(name, None, "interrupted before its end") for name in names]
        _write_matrix(outcomes, json_file, table_file, plot_file)
    return 1 if any(outcome.timing is None for outcome in outcomes) else 0


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _write_matrix(
    outcomes: Sequence[Outcome], json_file: Path, table_file: Path, plot_file: Path
) -> None:
    text = table(outcomes)
    table_file.write_text(text)
    written = [table_file, *([json_file] if json_file.exists() else [])]
    if rates := {o.name: o.timing["tflops_per_gpu"] for o in outcomes if o.timing is not None}:
        plot_file.write_text(rates_plot(rates))
        written.append(plot_file)
    print(f"\n{text}\nwritten to {', '.join(map(str, written))}")


def _time(args: argparse.Namespace, trace: Path | None) -> StepTiming | None:
    """Time steps; the first process of the job says how long they took, the others have None."""
    overrides = ["data.source=synthetic", *args.overrides]
    if args.documents is not None and not args.padded:
        overrides += ["data.reset_attention_mask=true", "data.reset_position_ids=true"]
    config = load_config(args.config, overrides)
    if args.documents is None and (args.padded or config.data.reset_attention_mask):
        raise ConfigError(
            "rows are packed or padded (data.reset_attention_mask, --padded), but of what length "
            "documents are is not said: give --documents MEDIAN SIGMA"
        )
    check_reads(config)
    if getattr(args, "scopes", False):
        config = _with_instructions(config)
    launch(config.runtime)
    if trace is not None and jax.default_backend() != "gpu":
        raise ConfigError(
            f"profile breaks down the time of a GPU, but the devices are {jax.default_backend()}: "
            "run it on GPUs, give --read with the trace of such a run, or time steps with `step`"
        )
    result = time_step(
        config,
        name=args.name,
        steps=args.steps,
        warmup=args.warmup,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        trace=trace,
        traced_steps=getattr(args, "traced_steps", 0),
        lengths=None if args.documents is None else DocumentLengths(*args.documents),
        padded=args.padded,
    )
    first = jax.process_index() == 0
    if first:
        print("\n".join([result.line(), *result.circumstances()]), flush=True)
    shutdown()
    return result if first else None


def _with_instructions(config: Config) -> Config:
    """The configuration with command buffers off: their kernels carry no instruction."""
    if config.parallel.dynamic_context:
        raise ConfigError(
            "--scopes reads the text of one compiled step, but parallel.dynamic_context is true, "
            "whose step is of several executables: set it to false, or leave --scopes out"
        )
    flags = config.runtime.xla_flags
    if given := {value for name, value in flags.items() if name.lstrip("-") == COMMAND_BUFFERS}:
        if given != {""}:
            raise ConfigError(
                f"--scopes needs runtime.xla_flags.{COMMAND_BUFFERS} empty, because kernels of "
                f"command buffers carry no instruction, but it is {given.pop()}: leave it out"
            )
        return config
    runtime = dataclasses.replace(config.runtime, xla_flags={**flags, COMMAND_BUFFERS: ""})
    return dataclasses.replace(config, runtime=runtime)


def _check_folder(file: Path | None, option: str) -> None:
    """Refuse a result's file whose folder is missing, before anything is measured."""
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{option} is {file}, but there is no folder {file.parent}: make it")
    if file is not None and file.is_dir():
        raise ConfigError(f"{option} is {file}, which is a folder: give a file in it")


def _print_breakdown(
    folder: Path, args: argparse.Namespace, drawn: Timeline | None
) -> ScopeTimes | None:
    """Print what a trace tells; returns what ``--scopes`` asks for."""
    text = read_step_text(folder) if args.scopes else None
    events = read_trace(folder)
    lines = breakdown(events).lines(args.traced_steps, args.top)
    print("\n".join([*lines, *by_device(events, args.traced_steps)]), flush=True)
    scopes = None if text is None else scope_times(kernels_of(events), text)
    if scopes is not None:
        print("\n".join(["", *scopes.lines(args.traced_steps)]), flush=True)
    if drawn is not None:
        args.timeline.write_text(measured_timeline(drawn, events))
        print(f"timeline written to {args.timeline}")
    return scopes


if __name__ == "__main__":
    raise SystemExit(run(main))
