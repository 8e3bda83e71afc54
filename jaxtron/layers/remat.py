"""What the backward pass keeps of a layer's forward pass and what it computes again."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxtron.config.run import Recompute

F = TypeVar("F", bound=Callable[..., Any])

# Operations that only move data.
MOVES = frozenset(
    {
        "all_gather",
        "broadcast_in_dim",
        "concatenate",
        "dynamic_slice",
        "gather",
        "reshape",
        "slice",
        "split",
        "squeeze",
        "transpose",
    }
)


def save_arithmetic(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy: keep results of arithmetic and named values, repeat what only moved data.

    Between a stored shard and a matrix product a weight is only moved (gathered, cut, joined with
    others), so no form of it is kept. Refusing the all-gather alone would not do: of query, key and
    value weights their concatenation would be kept instead. An activation that is worth keeping
    after a move carries a name (``checkpoint_name``).
    """
    return str(primitive) not in MOVES


def remat_layer(layer: F, recompute: Recompute, *, drop_gathered: bool, in_scan: bool) -> F:
    """Wrap a layer function ``(x, weights) -> x`` with the rematerialisation it needs.

    Args:
        layer: the function.
        recompute: ``train.recompute``; ``selective`` is applied inside the layer.
        drop_gathered: gather ZeRO-3 weights again in the backward pass instead of keeping them.
        in_scan: whether the function is the body of a scan. Only there may common-subexpression
            elimination be left on: elsewhere it would merge the recomputation with the original.
    """
    policy: Callable[..., bool]
    if recompute == "full":
        policy = jax.checkpoint_policies.nothing_saveable
    elif drop_gathered:
        policy = save_arithmetic
    else:
        return layer
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_scan)  # type: ignore[return-value]
