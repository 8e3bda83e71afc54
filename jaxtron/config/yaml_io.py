"""YAML as configuration files and overrides use it.

The scalars are those of YAML 1.2: ``1e-4`` is a number, ``on`` and ``off`` are words, ``1:30`` is
text. A key given twice in one mapping is refused instead of the last one winning.
"""

import json
import re
from collections.abc import Hashable
from typing import Any

import yaml

from jaxtron.errors import ConfigError

_FLOAT = re.compile(
    r"""[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?
       |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
       |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)""",
    re.VERBOSE,
)
_SCALARS = [
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+"), "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("merge", re.compile(r"<<"), "<"),
]


def _whole(pattern: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(rf"(?:{pattern.pattern})\Z", pattern.flags)


class _Loader(yaml.SafeLoader):
    """Safe loader with YAML 1.2 scalars that collects duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own convention

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first_line: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in first_line:
                self.duplicates.append(
                    f"key {key_node.value!r} in line {line} is already given in line "
                    f"{first_line[key_node.value]}: keep one of them"
                )
            first_line.setdefault(key_node.value, line)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes strings which either YAML version would read as something else."""


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole(_pattern), list(_first))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _whole(_FLOAT), list("-+.0123456789"))


def parse_yaml(text: str, origin: str) -> Any:
    """Parse one YAML document.

    Args:
        text: the document.
        origin: the file or override it comes from, for messages.

    Raises:
        ConfigError: the text is not YAML, or gives a key twice.
    """
    loader = _Loader(text)
    try:
        value = loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not valid YAML: {_one_line(error)}") from None
    finally:
        loader.dispose()
    if loader.duplicates:
        raise ConfigError("\n".join(f"{origin}: {problem}" for problem in loader.duplicates))
    return value


def to_yaml(value: dict[str, Any]) -> str:
    """Write a nested dict of plain values as YAML that :func:`parse_yaml` reads back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def spelled(value: Any) -> str:
    """A value for messages: null, true and false as YAML has them, all else as Python."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem
