"""Functions from outside the package, named in the configuration as ``module:function``."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from jaxtron.errors import ConfigError


def import_function(key: str, name: str, built_in: Iterable[str]) -> Callable[..., Any]:
    """Import what ``name``, the value of the configuration key ``key``, refers to.

    Args:
        key: the key, for messages: ``optimizer.name``.
        name: ``module:function``, of a module that Python finds (``PYTHONPATH``).
        built_in: the names that need no import, for messages.

    Raises:
        ConfigError: ``name`` has another form, cannot be imported, or is not a function.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(
            f"{key} is {name!r}; it must be one of {', '.join(built_in)} or module:function"
        )
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{key}={name} cannot be imported: {error}; it must be module:function with a module "
            "that Python finds (see PYTHONPATH)"
        ) from error
    if not callable(function):
        raise ConfigError(f"{key}={name} is a {type(function).__name__}, not a function")
    return function
