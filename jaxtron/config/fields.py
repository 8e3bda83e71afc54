"""How a part of jaxtron declares its configuration keys.

A part writes a frozen dataclass with :func:`section` and one :func:`key` per field, so that the
name, the type, the default and the meaning of a key stand in one place::

    @section
    class LossConfig:
        z_loss_coeff: float = key(0.0, "Weight of the squared log-partition term.")
"""

import dataclasses
import typing
from typing import Any, TypeVar

from pydantic import ConfigDict

from jaxtron.errors import ConfigError

T = TypeVar("T")

_PYDANTIC = ConfigDict(extra="forbid")


def key(default: Any = dataclasses.MISSING, help: str = "", **constraints: Any) -> Any:
    """Declare one configuration key.

    Args:
        default: the value when the key is absent; leave it out for a required key.
        help: one sentence for ``--help``; units in brackets.
        **constraints: bounds checked on load (``gt``, ``ge``, ``lt``, ``le``, ``min_length``).
    """
    metadata = {"help": help, "constraints": constraints}
    if isinstance(default, dict | list):
        frozen = default
        return dataclasses.field(default_factory=lambda: type(frozen)(frozen), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def refuse_url(name: str, path: str | None) -> None:
    """For keys that name a folder to write: a URL would become a folder of that odd name.

    Raises:
        ConfigError: ``path`` is a URL.
    """
    if path is not None and "://" in path:
        raise ConfigError(
            f"{name} is {path!r}: expected a folder on a file system that every process sees "
            "(mount the bucket), not a URL"
        )


@typing.dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(key, dataclasses.field)
)
def section(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, keyword-only configuration section."""
    cls.__pydantic_config__ = _PYDANTIC  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)
