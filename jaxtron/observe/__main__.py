"""``python -m jaxtron.observe``: look at what a run recorded."""

import argparse
from pathlib import Path

from jaxtron.cli import run
from jaxtron.observe.report import write_report


def main(argv: list[str] | None = None) -> int:
    """Run the verb; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="jaxtron observe",
        description="Look at what a run recorded.",
        epilog="example: python -m jaxtron.observe report runs/tiny --out tiny.html",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    report = verbs.add_parser(
        "report",
        help="write one HTML page with curves, final numbers and the configuration",
        description="Write one self-contained HTML page about a run.",
        epilog="example: python -m jaxtron.observe report runs/tiny --out tiny.html",
    )
    report.add_argument("run_dir", type=Path, help="the run's observe.dir")
    report.add_argument("--out", type=Path, help="file to write (default: RUN_DIR/report.html)")
    arguments = parser.parse_args(argv)
    print(write_report(arguments.run_dir, arguments.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
