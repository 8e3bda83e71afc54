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
    from jaxtron.mesh.inspect import Inspection


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
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parse_with_overrides(parser, argv)
    # Nothing is computed; a GPU must not be taken for it.
    jax.config.update("jax_platforms", "cpu")
    from jaxtron.mesh.inspect import default_devices, inspect_layout

    config = load_config(arguments.config, arguments.overrides)
    devices = default_devices(config) if arguments.devices is None else arguments.devices
    if devices < 1:
        raise ConfigError(f"--devices is {devices}: a mesh has at least 1 device")
    inspection = inspect_layout(config, devices)
    if arguments.html is not None:
        _write_page(inspection, arguments.html)
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


def _write_page(inspection: "Inspection", path: Path) -> None:
    from jaxtron.mesh.page import page

    try:
        path.write_text(page(inspection), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(run(main))
