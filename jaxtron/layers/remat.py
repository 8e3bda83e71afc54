"""What the backward pass keeps of a layer's forward pass and what it computes again."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxtron.config.run import Recompute
from jaxtron.parallel.data_sharding import GATHERED_WEIGHT

F = TypeVar("F", bound=Callable[..., Any])


def remat_layer(layer: F, recompute: Recompute, *, drop_gathered: bool, in_scan: bool) -> F:
    """Wrap a layer function ``(x, weights) -> x`` with the rematerialisation it needs.

    Args:
        layer: the function.
        recompute: ``train.recompute``; ``selective`` is applied inside the layer.
        drop_gathered: gather ZeRO-3 weights again in the backward pass instead of keeping them.
        in_scan: whether the function is the body of a scan. Only there may common-subexpression
            elimination be left on: elsewhere it would merge the recomputation with the original.
    """
    policies = jax.checkpoint_policies
    if recompute == "full":
        policy = policies.nothing_saveable
    elif drop_gathered:
        policy = policies.save_anything_except_these_names(GATHERED_WEIGHT)
    else:
        return layer
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_scan)  # type: ignore[return-value]
