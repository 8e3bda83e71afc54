"""Read a configuration: preset, then file, then overrides; every mistake reported at once."""

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtron.config.config import Config
from jaxtron.config.presets import load_preset, preset_names
from jaxtron.config.reads import READ_UNDER, is_read
from jaxtron.config.schema import keys, sections
from jaxtron.config.suggest import did_you_mean
from jaxtron.config.yaml_io import parse_yaml, spelled
from jaxtron.errors import ConfigError
from jaxtron.nearest import nearest

log = logging.getLogger(__name__)

Raw = dict[str, Any]
"""Nested plain values as a file gives them: ``{section: {key: value}}``."""

_PRESET_PATHS = (("preset",), ("model", "preset"))


def load_config(
    source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Build the configuration of a run.

    ``preset: NAME`` at the top of the source starts from all of a preset, ``model: {preset: NAME}``
    from its model alone. Keys of the source replace those of the preset, overrides replace both. A
    key whose value is a mapping is replaced whole by a file; an override may set one entry of it
    (``model.rope_scaling.factor=4``).

    A value of the preset that nothing reads any more under the source's choices is left out, with a
    warning; so is one of the source under the overrides (``precision.fp8=null`` over a file with
    details of FP8).

    Args:
        source: a YAML file, the name of a preset, nested mappings as a file would give them, or
            None for overrides alone.
        overrides: ``section.key=value`` with a YAML value.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, missing or given twice, or a
            value has the wrong type or is out of bounds. All problems are in one message.
    """
    raw = _read(source)
    problems: list[str] = []
    settings = []
    for override in overrides:
        try:
            settings.append(_parse_override(override))
        except ConfigError as error:
            problems.append(str(error))
    for path, value in settings:
        if path in _PRESET_PATHS:
            _set(raw, path, value)
    raw = _expand_presets(raw)
    below = copy.deepcopy(raw)
    for path, value in settings:
        if path not in _PRESET_PATHS:
            _set(raw, path, value)
    given = {".".join(path[:2]) for path, _ in settings}
    _leave_out_unread(raw, given, below, "the overrides", _origin(source))
    config = _build(raw, problems)
    if config is None:
        raise ConfigError(_report(source, overrides, list(dict.fromkeys(problems))))
    return config


def _report(source: Any, overrides: Sequence[str], problems: list[str]) -> str:
    """All problems in one message that begins with where the values came from."""
    origins = [_origin(source)] if isinstance(source, str | Path) else []
    origins += ["overrides"] if overrides and origins else []
    if not origins:
        return "\n".join(problems)
    separator = " " if len(problems) == 1 else "\n  "
    return separator.join([" + ".join(origins) + ":", *problems])


def _origin(source: Any) -> str:
    return str(source) if isinstance(source, str | Path) else "the configuration"


def _read(source: str | Path | Mapping[str, Any] | None) -> Raw:
    """The source's own keys; an empty section is an empty mapping."""
    origin = _origin(source)
    raw: Any
    if source is None:
        return {}
    if source in preset_names() and not Path(str(source)).exists():
        return {"preset": source}
    if isinstance(source, Mapping):
        raw = copy.deepcopy(dict(source))
    else:
        raw = parse_yaml(_read_text(Path(source)), origin) or {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin} holds {raw!r}: expected sections with keys below them")
    for name, value in raw.items():
        if value is None:
            raw[name] = {}
        elif name in sections() and not isinstance(value, dict):
            raise ConfigError(
                f"{origin}: {name} is {value!r}, but it is a section: write its keys below it"
            )
    return raw


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        hint = ""
        if path.stem in preset_names():
            hint = f"; the preset of that name is used by `preset={path.stem}`"
        elif not path.suffix and isinstance(error, FileNotFoundError):
            hint = f", nor is there such a preset: {nearest(path.name, preset_names())}"
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is not UTF-8 text: {error}") from None


def _parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    """Split ``section.key=value`` into its path and its value."""
    dotted, equals, text = override.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"override {override!r}: expected section.key=value")
    if path not in _PRESET_PATHS:
        info = keys().get(".".join(path[:2]))
        if info is None:
            raise ConfigError(f"override {override!r}: no such key{did_you_mean(dotted)}")
        if len(path) > 2 and not info.is_mapping:
            raise ConfigError(f"override {override!r}: {info.dotted} takes {info.expected}")
    return path, parse_yaml(text, f"override {override!r}")


def _set(raw: Raw, path: tuple[str, ...], value: Any) -> None:
    """Set one value; an entry inside a mapping leaves the mapping's other entries."""
    *parents, name = path
    place = raw
    for depth, parent in enumerate(parents, start=1):
        if not isinstance(place.get(parent), dict):
            info = keys().get(".".join(path[:depth]))
            place[parent] = dict(info.default) if info and isinstance(info.default, dict) else {}
        place = place[parent]
    place[name] = value


def _expand_presets(raw: Raw) -> Raw:
    """Put the named presets below the given keys."""
    raw = dict(raw)
    base: Raw = {}
    if "preset" in raw:
        base = load_preset(raw.pop("preset"))
    if "preset" in raw.get("model", {}):
        model = dict(raw["model"])
        base["model"] = load_preset(model.pop("preset"))["model"]
        raw["model"] = model
    merged = dict(base)
    for name, values in raw.items():
        merged[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    given = {f"{name}.{key}" for name, keys in raw.items() if name in sections() for key in keys}
    _leave_out_unread(merged, given, base, "the keys over it", "the preset")
    return merged


def _leave_out_unread(
    raw: Raw, given: Collection[str], below: Raw, choices: str, origin: str
) -> None:
    """Take the values out of ``raw`` that ``given`` keys have turned off, and say so.

    Whoever turns FP8 off over a file that has its details makes no mistake; a file that gives them
    without FP8 does, and one of its values stays, to be refused.

    Args:
        raw: ``below`` with other values over it; changed.
        given: the keys of these values, which stay.
        below: of which a value is left out if it was read there and is not in ``raw``.
        choices: what the given keys are, for the message.
        origin: of ``below``, for the message.
    """
    out: dict[str, str] = {}
    while turned_off := [
        info
        for info in map(keys().__getitem__, READ_UNDER.keys() - set(given))
        if raw.get(info.section, {}).get(info.name, info.default) != info.default
        and is_read(below, info.dotted)
        and not is_read(raw, info.dotted)
    ]:
        for info in turned_off:  # others may depend on it
            out[info.dotted] = spelled(raw[info.section].pop(info.name))
    if out:
        values = ", ".join(f"{key}={out[key]}" for key in READ_UNDER if key in out)
        log.warning("%s: left out what nothing reads under %s: %s", origin, choices, values)


def _build(raw: Raw, problems: list[str]) -> Config | None:
    """The configuration, or None after appending what is wrong to ``problems``."""
    for name, values in raw.items():
        if name not in sections():
            problems.append(f"{name} is not a section{did_you_mean(str(name))}")
            continue
        problems += [
            f"{name}.{key} is not a key{did_you_mean(f'{name}.{key}')}"
            for key in values
            if f"{name}.{key}" not in keys()
        ]
    built = {name: _build_section(name, raw.get(name, {}), problems) for name in sections()}
    return None if problems else Config(**built)


def _build_section(name: str, given: Raw, problems: list[str]) -> Any:
    infos = [info for info in keys().values() if info.section == name]
    missing = [info for info in infos if info.required and info.name not in given]
    before = len(problems)
    if name == "model" and not given:
        names = ", ".join(preset_names())
        problems.append(
            f"no model is given: set preset to one of {names}, or write a model section"
        )
    else:
        problems += [f"{i.dotted} is missing: expected {i.expected}. {i.help}" for i in missing]
    values = {}
    for info in infos:
        if info.name in given:
            try:
                values[info.name] = info.convert(given[info.name])
            except ConfigError as error:
                problems.append(str(error))
    if len(problems) > before:
        return None
    try:
        return sections()[name](**values)
    except ConfigError as error:
        problems.append(str(error))
        return None
