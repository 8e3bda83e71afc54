"""What the scans of a traced function carry and stack."""

from typing import Any, NamedTuple


class Scan(NamedTuple):
    """Types of one scan's results: carried from turn to turn, and stacked from all turns."""

    carried: list[Any]
    stacked: list[Any]


def scans(jaxpr: Any, length: int) -> list[Scan]:
    """The scans of ``length`` turns in a jaxpr that are not inside one another, in order."""
    found: list[Scan] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and equation.params["length"] == length:
            found.append(_scan(equation))
            continue
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += scans(inner, length)
    return found


def _scan(equation: Any) -> Scan:
    carried, stacked = [], []
    for outer, inner in zip(equation.outvars, equation.params["jaxpr"].jaxpr.outvars, strict=True):
        same = outer.aval.shape == inner.aval.shape  # stacking adds a dimension
        (carried if same else stacked).append(outer.aval)
    return Scan(carried, stacked)
