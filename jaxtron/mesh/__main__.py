"""``python -m jaxtron.mesh``: the device mesh, and how every parameter is split over it."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxtron.cli import parse_with_overrides, run
from jaxtron.config.load import load_config
from jaxtron.errors import ConfigError

if TYPE_CHECKING:
    from jaxtron.mesh.timeline import Timeline


def main(argv: list[str] | None = None) -> int:
    """Run the verb; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="jaxtron mesh",
        description="Show axes, device grid, the placement and bytes of every parameter, the state "
        "a device holds, and which features are really on. No device is used: any number can be "
        "shown on any machine.",
        epilog="example: python -m jaxtron.mesh --config configs/llama3_8b.yaml --devices 64 "
        "parallel.fsdp=-1 parallel.tensor=2 --print",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="devices of the job (default: the product of the axes, one of -1 counted as 1)",
    )
    parser.add_argument(
        "--print", action="store_true", help="print everything and end (default without a terminal)"
    )
    parser.add_argument(
        "--interactive", action="store_true", help="ask what to show (default on a terminal)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that shows it all")
    parser.add_argument(
        "--schedule",
        action="store_true",
        help="print the pipeline's timeline instead: ticks, bubble, what each stage holds",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw the pipeline's timeline to a file"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parse_with_overrides(parser, argv)
    # Nothing is computed; a GPU must not be taken for it.
    jax.config.update("jax_platforms", "cpu")
    from jaxtron.config.validate import validate
    from jaxtron.mesh.inspect import default_devices, inspect_layout
    from jaxtron.mesh.timeline import make_timeline

    config = load_config(arguments.config, arguments.overrides)
    devices = default_devices(config) if arguments.devices is None else arguments.devices
    if devices < 1:
        raise ConfigError(f"--devices is {devices}: a mesh has at least 1 device")
    if arguments.schedule or arguments.svg is not None:
        _show_timeline(make_timeline(config, validate(config, devices)), arguments)
        if not (arguments.print or arguments.interactive or arguments.html):
            return 0
    inspection = inspect_layout(config, devices)
    if arguments.html is not None:
        from jaxtron.mesh.page import page

        _write("--html", arguments.html, page(inspection))
    ask = arguments.interactive or (
        not arguments.print and arguments.html is None and sys.stdin.isatty()
    )
    if arguments.print or ask or arguments.html is None:
        from jaxtron.mesh.text import render

        print(render(inspection))
    if ask:
        from jaxtron.mesh.prompt import prompt

        prompt(inspection)
    return 0


def _show_timeline(timeline: "Timeline", arguments: argparse.Namespace) -> None:
    from jaxtron.mesh.timeline import render_timeline
    from jaxtron.mesh.timeline_svg import timeline_svg

    if arguments.schedule:
        print(render_timeline(timeline))
    if arguments.svg is not None:
        _write("--svg", arguments.svg, timeline_svg(timeline))


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(run(main))
