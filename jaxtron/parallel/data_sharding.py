"""Gathering parameters for compute and reducing their gradients: the one rule.

With ``parallel.data_sharding`` above ``no_shard`` a parameter is stored in pieces over its
``zero_axes``. Layers compute with a gathered copy in the compute dtype. The gradient of the copy is
summed over exactly the mesh axes on which the copy is replicated: scattered over
``zero_axes``, which the stored parameter has, and by ``psum`` over the rest. No layer reduces
gradients by itself.

The levels differ only in *when* these run (Rajbhandari et al. 2020, arXiv:1910.02054):

==================== ======================== ==================================
level                gather                   scatter
==================== ======================== ==================================
no_shard             never                    never
optim (1)            once per step            once per step, after accumulation
optim_grads (2)      once per step            every microbatch
optim_grads_params(3)in the layer, twice      every microbatch, the gather's transpose
==================== ======================== ==================================
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.parallel.param_layout import ParamLayout
from jaxtron.parallel.reduction import Reduction
from jaxtron.parallel.region import Region


def gather_copy(w: jax.Array, layout: ParamLayout) -> jax.Array:
    """The copy layers compute with, from the stored shard; not for differentiation."""
    w = w.astype(layout.compute_dtype)
    if layout.zero_axes:
        w = lax.all_gather(w, layout.zero_axes, axis=layout.zero_dim, tiled=True)
    return w


def scatter_gradient(g: jax.Array, layout: ParamLayout, reduction: Reduction) -> jax.Array:
    """Sum a copy's gradient over ``zero_axes`` and keep this device's shard, in fp32."""
    if layout.zero_axes:
        g = reduction.scatter(g, layout.zero_axes, layout.zero_dim)
    return g.astype(jnp.float32)


def sum_gradient(
    g: jax.Array, layout: ParamLayout, region: Region, reduction: Reduction
) -> jax.Array:
    """Sum a scattered gradient over the axes on which the stored parameter is replicated."""
    axes = region.live(layout.replicated_axes)
    if not axes:
        return g
    return lax.psum(g.astype(reduction.dtype), axes).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_weight(w: jax.Array, layout: ParamLayout, reduction: Reduction) -> jax.Array:
    """Differentiable gather inside a layer (ZeRO-3).

    The plain transpose of a bf16 all-gather would reduce gradients in bf16; here they are summed as
    ``reduction`` says.
    """
    return gather_copy(w, layout)


def _gather_weight_fwd(w: jax.Array, layout: ParamLayout, reduction: Reduction) -> Any:
    return gather_copy(w, layout), None


def _gather_weight_bwd(layout: ParamLayout, reduction: Reduction, _: None, g: jax.Array) -> Any:
    return (scatter_gradient(g, layout, reduction),)


gather_weight.defvjp(_gather_weight_fwd, _gather_weight_bwd)
