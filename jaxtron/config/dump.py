"""The resolved configuration as plain values and as YAML."""

import dataclasses
import json
from typing import Any

from jaxtron.config.config import Config
from jaxtron.config.yaml_io import to_yaml


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Every key with its value, as nested plain values; ``load_config`` of it gives ``config``."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def dump_config(config: Config) -> str:
    """Every key with its value, as YAML; loading the text as a file gives ``config`` again."""
    return to_yaml(to_dict(config))
