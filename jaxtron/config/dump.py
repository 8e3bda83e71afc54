"""The resolved configuration as plain values."""

import dataclasses
import json
from typing import Any

from jaxtron.config.config import Config


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Every key with its value, as nested plain values; ``load_config`` of it gives ``config``."""
    return json.loads(json.dumps(dataclasses.asdict(config)))
