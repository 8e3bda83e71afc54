"""The presets that ship with jaxtron: complete configurations of published models."""

import functools
from pathlib import Path
from typing import Any

from jaxtron.config.yaml_io import parse_yaml
from jaxtron.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


@functools.cache
def presets_dir() -> Path:
    """Folder of the preset files: inside an installed package, else beside it in a checkout."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Names that ``preset: NAME`` accepts."""
    return tuple(sorted(path.stem for path in presets_dir().glob("*.yaml")))


def load_preset(name: Any) -> dict[str, Any]:
    """The sections of a preset as plain nested values.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in preset_names():
        raise ConfigError(f"preset is {name!r}: expected one of {', '.join(preset_names())}")
    path = presets_dir() / f"{name}.yaml"
    return parse_yaml(path.read_text(encoding="utf-8"), str(path))
