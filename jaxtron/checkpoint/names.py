"""Names of the arrays in a state: how a pytree becomes a checkpoint's table, and back.

A checkpoint stores plain nested dicts of arrays, whatever containers the state is made of: an Optax
named tuple is stored by its field names, a tuple by its positions (``opt_state/0/mu/...``), and
empty nodes are not stored. The state's own containers come back from the abstract state it is
restored into.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxtron.checkpoint.meta import ArrayRecord
from jaxtron.errors import CheckpointError

SEPARATOR = "/"


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of ``tree`` by name, in pytree order.

    Raises:
        ValueError: a key of the tree contains ``/`` or ``.``, which separate names in the files.
    """
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
        for part in parts:
            if SEPARATOR in part or "." in part:
                raise ValueError(f"state key {part!r} contains '/' or '.'; rename it")
        named[SEPARATOR.join(parts)] = leaf
    return named


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """Plain nested dicts from named leaves: ``{"a/b": x}`` becomes ``{"a": {"b": x}}``."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split(SEPARATOR)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def with_leaves(tree: Any, named: Mapping[str, Any]) -> Any:
    """``tree`` with each leaf replaced by the one of the same name."""
    return jax.tree.unflatten(
        jax.tree.structure(tree), [named[name] for name in named_leaves(tree)]
    )


def entry_of(name: str) -> str:
    """The top-level entry of the state an array belongs to: ``params``, ``opt_state``, ..."""
    return name.split(SEPARATOR, 1)[0]


def require_match(
    saved: Mapping[str, ArrayRecord], wanted: Mapping[str, jax.ShapeDtypeStruct], where: str
) -> dict[str, ArrayRecord]:
    """Check that the wanted arrays are in a checkpoint, by name, shape and dtype.

    Within the top-level entries that are wanted, the checkpoint must not hold other arrays either.

    Args:
        saved: what the checkpoint holds.
        wanted: what the run needs.
        where: the checkpoint, for the message.

    Returns:
        The records of the wanted arrays.

    Raises:
        CheckpointError: they differ; the message lists every difference.
    """
    present = {entry_of(name) for name in saved}
    entries = {entry_of(name) for name in wanted}
    if absent := sorted(entries - present):
        raise CheckpointError(_absent_entries(absent, present, where))
    saved = {name: record for name, record in saved.items() if entry_of(name) in entries}
    problems = []
    for name in sorted(set(wanted) | set(saved)):
        if name not in saved:
            array = wanted[name]
            problems.append(f"  {name}: model {_describe(array)}, not in the checkpoint")
        elif name not in wanted:
            problems.append(f"  {name}: checkpoint {_describe(saved[name])}, not in the model")
        elif _describe(saved[name]) != _describe(wanted[name]):
            problems.append(
                f"  {name}: checkpoint {_describe(saved[name])}, model {_describe(wanted[name])}"
            )
    if problems:
        shown = "(`python -m jaxtron.checkpoint show` prints it)"
        advice = f"Use the model configuration it was saved with {shown}."
        if all(problem.startswith("  opt_state/") for problem in problems):
            advice = (
                "Only optimizer state does: it is another optimizer's. Use the optimizer it was "
                f"saved with {shown}, or set checkpoint.load to it, checkpoint.no_load_optim=true "
                "and another checkpoint.dir to go on with a fresh state."
            )
        raise CheckpointError(
            f"{where} does not fit this model: {len(problems)} arrays differ. {advice}\n"
            + "\n".join(problems)
        )
    return saved


def _absent_entries(absent: list[str], present: set[str], where: str) -> str:
    message = f"{where} holds no {', '.join(absent)} (it holds {', '.join(sorted(present))})"
    if absent == ["opt_state"]:
        message += (
            ": it was saved with checkpoint.no_save_optim. To go on with a fresh optimizer state, "
            "set checkpoint.load to it and checkpoint.no_load_optim=true (or checkpoint.finetune)"
        )
    return message


def _describe(array: ArrayRecord | jax.ShapeDtypeStruct) -> str:
    return f"{array.dtype}{list(array.shape)}"
