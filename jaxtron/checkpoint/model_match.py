"""Refuse to go on with a checkpoint of another architecture.

Shapes alone do not tell: rope base, activation, norm epsilon or the number of heads of one total
width change what the same arrays mean.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jaxtron.errors import CheckpointError

_ABSENT = "(not set)"


def require_same_model(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    where: str,
    may_differ: Collection[str] = (),
) -> None:
    """Compare the ``model`` section a checkpoint was saved with and the run's own.

    Args:
        saved: plain values from the checkpoint's ``config["model"]``.
        current: the run's, in the same form.
        where: the checkpoint, for the message.
        may_differ: keys that do not change what the weights mean (kernel choice, dropout, ...).

    Raises:
        CheckpointError: other keys differ; lists each with both values.
    """
    differing = [
        name
        for name in sorted({*saved, *current})
        if name not in may_differ and saved.get(name, _ABSENT) != current.get(name, _ABSENT)
    ]
    if differing:
        lines = [
            f"  model.{name}: checkpoint {saved.get(name, _ABSENT)}, "
            f"run {current.get(name, _ABSENT)}"
            for name in differing
        ]
        raise CheckpointError(
            f"{where} was saved with another model: set these keys to the checkpoint's values, or "
            "start from another checkpoint\n" + "\n".join(lines)
        )
