"""``python -m jaxtron.bench step --config FILE [section.key=value ...]``: time training steps."""

import argparse
import logging
import os
import sys
from pathlib import Path

from jaxtron.bench.step import time_step
from jaxtron.cli import parse_with_overrides, run
from jaxtron.config.load import load_config
from jaxtron.launch.initialize import launch, shutdown

EXAMPLE = """example:
  python -m jaxtron.bench step --config configs/llama3_8b.yaml --steps 5 --json out.json \\
      model.num_layers=8 data.seq_length=4096 train.global_batch_size=16
"""


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark; prints one line, and writes JSON when asked."""
    parser = argparse.ArgumentParser(prog="jaxtron bench", description="Measure training steps.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    step = verbs.add_parser(
        "step",
        help="time whole optimizer steps on random tokens",
        description="Compile, warm up and time whole optimizer steps on random tokens.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    step.add_argument("--config", metavar="FILE", help="YAML file or preset")
    step.add_argument("--name", default="step", help="name of the case in the output")
    step.add_argument("--steps", type=int, default=5, help="timed steps")
    step.add_argument("--warmup", type=int, default=2, help="steps before them that do not count")
    step.add_argument("--json", type=Path, help="append the result to this file, a JSON line")
    step.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parse_with_overrides(parser, argv)
    # force: libraries imported above may have set up logging already.
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    for noisy in ("absl", "jax", "orbax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    config = load_config(args.config, ["data.source=synthetic", *args.overrides])
    launch(config.runtime)
    result = time_step(
        config,
        name=args.name,
        steps=args.steps,
        warmup=args.warmup,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
    )
    print(result.line(), flush=True)
    if args.json is not None:
        with args.json.open("a") as file:
            file.write(result.to_json() + "\n")
    shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
