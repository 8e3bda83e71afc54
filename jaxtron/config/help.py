"""The list of all configuration keys, for ``--help-config``."""

import textwrap
import typing

from jaxtron.config.schema import keys, sections
from jaxtron.config.yaml_io import to_yaml

_INDENT = " " * 6


def help_config(only: str | None = None, width: int = 100) -> str:
    """Every key with the values it takes, its default and its meaning.

    Args:
        only: one section; None for all.
        width: longest line [characters].
    """
    lines = []
    for name, cls in sections().items():
        if only not in (None, name):
            continue
        lines += [f"{name}: {(cls.__doc__ or '').strip().splitlines()[0]}", ""]
        for info in keys().values():
            if info.section == name:
                default = "required" if info.required else f"default {_shown(info.default)}"
                lines.append(f"  {info.dotted}   ({default})")
                text = f"{info.help} Takes {info.expected}."
                lines += textwrap.wrap(
                    text,
                    width,
                    initial_indent=_INDENT,
                    subsequent_indent=_INDENT,
                    break_on_hyphens=False,
                    break_long_words=False,
                )
        lines.append("")
    return "\n".join(lines)


def _shown(value: typing.Any) -> str:
    """A default as an override would spell it."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, list | dict):
        return str(value)
    return to_yaml({"": value}).partition(":")[2].strip()
