"""Messages said once in a process, however often what they tell of is decided."""

import logging
from functools import cache


@cache
def log_once(logger: logging.Logger, message: str, level: int = logging.INFO) -> None:
    """Log ``message`` unless the same has been logged there already."""
    logger.log(level, message)
