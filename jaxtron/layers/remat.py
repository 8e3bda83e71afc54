"""What the backward pass keeps of a layer's forward pass and what it computes again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax import lax

from jaxtron.config.run import Recompute, RecomputeMethod
from jaxtron.layers.activation_names import ACTIVATION_NAMES, GATHERED_WEIGHT

F = TypeVar("F", bound=Callable[..., Any])
Policy = Callable[..., Any]

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

# Forward passes of fused attention kernels: output and softmax statistics, both of which their
# backward passes read. The statistics cannot be named from outside, so these results stand for
# core_attn.
FUSED_ATTENTION = frozenset({"dot_product_attention_fwd_wrapper"})


@dataclass(frozen=True)
class Remat:
    """Rematerialisation of a model's layers.

    Attributes:
        recompute: ``train.recompute``.
        method: ``train.recompute_method``.
        num_layers: ``train.recompute_num_layers``.
        drop_gathered: gather ZeRO-3 weights again in the backward pass instead of keeping them.
        passes_apart: whether forward and backward pass of the layers are never in one stretch of
            the program (on a pipeline the residuals go through a buffer).
    """

    recompute: Recompute = "none"
    method: RecomputeMethod | None = None
    num_layers: int | None = None
    drop_gathered: bool = False
    passes_apart: bool = False


def save_arithmetic(primitive: Any, *_: Any, **params: Any) -> bool:
    """Policy: keep results of arithmetic and named activations, repeat what only moved data.

    Between a stored shard and a matrix product a weight is only moved (gathered, cut, joined with
    others), so no form of it is kept. Refusing the all-gather alone would not do: of query, key and
    value weights their concatenation would be kept instead. An activation that is worth keeping
    after a move carries a name (``checkpoint_name``).
    """
    if str(primitive) == "name":
        return params["name"] != GATHERED_WEIGHT
    return str(primitive) not in MOVES


def by_name(actions: Mapping[str, str], *, drop_gathered: bool) -> Policy:
    """Policy of ``train.recompute: {name: save | recompute | offload}``.

    Of a layer are kept: its input, the named activations that ``actions`` does not list or lists as
    ``save``, and in pinned host memory those listed as ``offload``; of these only what the backward
    pass reads. Everything without a name is computed again from the nearest kept values: inside of
    norms, activation functions, attention probabilities, dropout masks, sums of the residual
    stream. A name cannot be left out alone: if values without a name were kept, the very same
    numbers would be, one operation earlier.
    """
    names = {name: actions.get(name, "save") for name in ACTIVATION_NAMES}
    saved = {name for name, action in names.items() if action == "save"}
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved if drop_gathered else saved | {GATHERED_WEIGHT},
        names_which_can_be_offloaded={n for n, action in names.items() if action == "offload"},
        offload_src="device",
        offload_dst="pinned_host",
    )
    attention = names["core_attn"]

    def policy(primitive: Any, *operands: Any, **params: Any) -> Any:
        if str(primitive) not in FUSED_ATTENTION:
            return named(primitive, *operands, **params)
        return _offload() if attention == "offload" else attention == "save"

    return policy


def _offload() -> Any:
    """What a policy answers to have a result offloaded, whatever it is the result of.

    Its class is not public; this policy gives it for every product without batch dimensions.
    """
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return policy(lax.dot_general_p, dimension_numbers=(((), ()), ((), ())))


def recompute_all(*, drop_gathered: bool) -> Policy:
    """Policy: keep inputs alone, and gathered weights unless they are dropped."""
    if drop_gathered:
        return jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint_policies.save_only_these_names(GATHERED_WEIGHT)


def remat_layer(layer: F, recompute: Recompute, *, drop_gathered: bool, apart: bool) -> F:
    """Wrap a layer function ``(x, weights, ...) -> x`` with the rematerialisation it needs.

    Args:
        layer: the function; for ``full`` it may be several layers.
        recompute: ``train.recompute``; ``selective`` is applied inside the layer.
        drop_gathered: gather ZeRO-3 weights again in the backward pass instead of keeping them.
        apart: whether the function's forward and backward pass are apart in the program, as in the
            bodies of a scan. Only then may common-subexpression elimination be left on: elsewhere
            it would merge the recomputation with the original, and drop an offload. What keeps it
            off also keeps XLA from reading residuals where they lie.
    """
    policy: Policy
    if recompute == "full":
        policy = recompute_all(drop_gathered=drop_gathered)
    elif isinstance(recompute, dict):
        policy = by_name(recompute, drop_gathered=drop_gathered)
    elif drop_gathered:
        policy = save_arithmetic
    else:
        return layer
    return jax.checkpoint(layer, policy=policy, prevent_cse=not apart)  # type: ignore[return-value]
