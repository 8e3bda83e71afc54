"""Every configuration key with its type, default, bounds and meaning, read from the sections."""

import dataclasses
import functools
import json
import math
import types
import typing
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from jaxtron.config.config import Config
from jaxtron.config.yaml_io import spelled
from jaxtron.errors import ConfigError

_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    Any: "any value",
}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclasses.dataclass(frozen=True)
class KeyInfo:
    """One key of one section."""

    section: str
    name: str
    type: Any
    required: bool
    default: Any
    help: str
    constraints: dict[str, Any]

    @property
    def dotted(self) -> str:
        """The key as overrides spell it: ``section.key``."""
        return f"{self.section}.{self.name}"

    @property
    def expected(self) -> str:
        """The values that the key takes, in words."""
        return describe_type(self.type, self.constraints)

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping, so that overrides may name a key inside it."""
        members = (self.type, *typing.get_args(self.type))
        return any((typing.get_origin(member) or member) is dict for member in members)

    def convert(self, value: Any) -> Any:
        """The value in the key's type.

        Nothing is guessed: text is not read as a number, nor 1 as true. An integer is accepted
        where a number is expected and a list where a tuple is. Numbers are finite.

        Raises:
            ConfigError: the value has another type or is out of bounds.
        """
        try:
            return _adapter(self.section, self.name).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError, ValueError):
            hint = ""
            if isinstance(value, dict) and any(":" in str(name) for name in value):
                hint = " (in YAML a space follows the colon: {name: value})"
            elif isinstance(value, str) and typing.get_origin(self.type) is list:
                hint = f": write [{value}]"
            elif isinstance(value, float) and not math.isfinite(value):
                hint = " (a finite number)"
            raise ConfigError(
                f"{self.dotted} is {spelled(value)}: expected {self.expected}{hint}"
            ) from None


@functools.cache
def sections() -> dict[str, type]:
    """The section dataclasses by name, in the order of ``Config``."""
    hints = typing.get_type_hints(Config)
    return {field.name: hints[field.name] for field in dataclasses.fields(Config)}


@functools.cache
def keys() -> dict[str, KeyInfo]:
    """All keys as ``{"section.key": KeyInfo}``, in the order of their declaration."""
    infos = {}
    for section_name, cls in sections().items():
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            required = field.default is field.default_factory is dataclasses.MISSING
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            info = KeyInfo(
                section=section_name,
                name=field.name,
                type=hints[field.name],
                required=required,
                default=None if required else default,
                help=field.metadata["help"],
                constraints=field.metadata["constraints"],
            )
            infos[info.dotted] = info
    return infos


@functools.cache
def _adapter(section: str, name: str) -> TypeAdapter[Any]:
    info = keys()[f"{section}.{name}"]
    annotated: Any = Annotated[info.type, Field(**info.constraints)]
    return TypeAdapter(annotated, config=ConfigDict(allow_inf_nan=False))


def describe_type(type_: Any, constraints: dict[str, Any] | None = None) -> str:
    """A type and its bounds in words: ``an integer ≥ 1, or null``."""
    limits = [f"{_BOUNDS[k]} {limit}" for k, limit in (constraints or {}).items() if k in _BOUNDS]
    bounds = " " + " and ".join(limits) if limits else ""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin is Annotated:
        return describe_type(arguments[0], _annotated_bounds(arguments[1:]) | (constraints or {}))
    if origin in (typing.Union, types.UnionType):
        members = [describe_type(a, constraints) for a in arguments if a is not types.NoneType]
        return ", or ".join([*members, *(["null"] if types.NoneType in arguments else [])])
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin is list or type_ is list:
        if not arguments or arguments[0] is Any:
            return "a list"
        item = describe_type(arguments[0])
        return f"a list of ({item})" if ", or" in item else f"a list of {item}"
    if origin is tuple:
        return "[" + ", ".join(describe_type(a) for a in arguments if a is not Ellipsis) + "]"
    if origin is dict or type_ is dict:
        plain = not arguments or arguments[1] is Any
        return "a mapping" if plain else f"a mapping {{name: {describe_type(arguments[1])}}}"
    return _NAMES.get(type_, getattr(type_, "__name__", str(type_))) + bounds


def _annotated_bounds(metadata: tuple[Any, ...]) -> dict[str, Any]:
    """Bounds that pydantic's ``Field`` carries inside an ``Annotated`` type."""
    found = {}
    for item in metadata:
        for constraint in getattr(item, "metadata", [item]):
            for name in _BOUNDS:
                if hasattr(constraint, name):
                    found[name] = getattr(constraint, name)
    return found
