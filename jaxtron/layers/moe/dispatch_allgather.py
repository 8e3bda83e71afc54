"""Dispatch by gathering: every device sees all tokens of its group."""

import jax
from jax import lax

from jaxtron.layers.moe.dispatch import DispatchPlan, RunExperts, own_experts
from jaxtron.layers.moe.permute import combine_rows, group_by_expert, place_rows


def dispatch_allgather(
    x: jax.Array, experts: jax.Array, weights: jax.Array, run: RunExperts, plan: DispatchPlan
) -> jax.Array:
    """Gather the tokens, apply the own experts, add up over devices and scatter.

    A token travels to every device of the group once, whatever it chose: cheap while
    ``group <= topk``.
    """
    tokens, topk = experts.shape
    x, experts, weights = (
        lax.all_gather(a, plan.axes, axis=0, tiled=True) for a in (x, experts, weights)
    )
    slots, stride = plan.slots(tokens, topk)
    own = own_experts(experts, plan)
    permutation, sizes = group_by_expert(own, plan.local_experts, slots, stride, plan.tile)
    out = run(place_rows(x, permutation, plan.kernels), sizes)
    y = combine_rows(out, weights, permutation, plan.kernels)
    return lax.psum_scatter(y, plan.axes, scatter_dimension=0, tiled=True)
