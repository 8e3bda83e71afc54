"""Additions in a traced program."""

from typing import Any


def additions(jaxpr: Any, shape: tuple[int, ...]) -> int:
    """Additions of two whole arrays of ``shape`` in a program."""
    count = 0
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                count += additions(inner, shape) if hasattr(inner, "eqns") else 0
        whole = [getattr(v.aval, "shape", None) == shape for v in eqn.invars]
        count += eqn.primitive.name in ("add", "add_any") and all(whole)
    return count
