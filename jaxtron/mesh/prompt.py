"""The interactive form: type a name and see what it holds."""

import fnmatch
from collections.abc import Callable

from jaxtron.mesh.axes import AXES
from jaxtron.mesh.inspect import Inspection
from jaxtron.mesh.text import (
    axes_text,
    axis_text,
    device_text,
    features_text,
    grid_text,
    param_text,
    params_text,
    rule_text,
    state_text,
)
from jaxtron.nearest import nearest

HELP = """\
Type one of:
  a device number      what it holds and computes
  an axis              {axes}
  a dimension's name   its rule: {rules}
  a parameter          its name, a part of it, or a pattern such as layers/*/norm*
  axes, grid, params, state, features
  help, quit"""

_VIEWS: dict[str, Callable[[Inspection], str]] = {
    "axes": axes_text,
    "grid": grid_text,
    "params": lambda inspection: params_text(inspection, inspection.params),
    "state": state_text,
    "features": features_text,
}
_LEAVE = ("quit", "exit", "q")


def answer(inspection: Inspection, line: str) -> str:
    """The answer to one line typed by the user."""
    word = line.strip()
    if not word or word in ("help", "?"):
        return HELP.format(axes=", ".join(AXES), rules=", ".join(inspection.rules.table))
    if word in _VIEWS:
        return _VIEWS[word](inspection)
    if word.isdecimal():
        last = inspection.num_devices - 1
        if int(word) > last:
            return f"no device {word}: they are numbered 0 to {last}"
        return device_text(inspection, int(word))
    if word in AXES:
        return axis_text(inspection, word)
    if word in inspection.rules.table:
        return rule_text(inspection, word)
    found = [
        param
        for param in inspection.params
        if word == param.name or word in param.name or fnmatch.fnmatchcase(param.name, word)
    ]
    exact = [param for param in found if param.name == word]
    if len(found) == 1 or exact:
        return param_text(inspection, (exact or found)[0])
    if found:
        return params_text(inspection, found)
    names = [*(param.name for param in inspection.params), *AXES, *inspection.rules.table, *_VIEWS]
    return f"nothing is called {word!r}; {nearest(word, names)}"


def prompt(inspection: Inspection, read: Callable[[str], str] = input) -> None:
    """Answer lines until ``quit`` or the end of the input."""
    print("\nType a parameter, an axis, a dimension's name or a device number; help, quit.")
    while True:
        try:
            line = read("mesh> ")
        except EOFError:
            print()
            return
        if line.strip() in _LEAVE:
            return
        print(answer(inspection, line))
