"""Which weights of a model are multiplied in FP8, and how they become so.

Inside the manual region weights are quantised once a step, outside of the microbatch loop, from the
fp32 master weights; of a sharded weight each device quantises its shard, and the FP8 values are
gathered. The derivative goes straight through to the weight as it was before (Bengio et al. 2013,
arXiv:1308.3432).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.layers.activation_names import GATHERED_WEIGHT
from jaxtron.mesh.axes import AXES
from jaxtron.parallel.data_sharding import scatter_gradient
from jaxtron.parallel.param_layout import ParamLayout
from jaxtron.parallel.reduction import Reduction
from jaxtron.parallel.region import Region
from jaxtron.precision.fp8_delayed import DelayedScaling, Scales
from jaxtron.precision.fp8_weight import (
    Fp8Gradient,
    Fp8Site,
    Fp8Weight,
    is_fp8,
    is_fp8_gradient,
)
from jaxtron.precision.quantise import amax, quantise, scale_of


@dataclass(frozen=True)
class Fp8Plan:
    """FP8 in the layers of one model on one mesh.

    Attributes:
        sites: per weight of a layer (``attention/query``), the product it belongs to.
        layouts: per such weight, its layout within a layer.
        bf16: pairs of layer number and product name that stay in the compute dtype; none where
            layers are scanned.
        region: the manual region.
        gathers_in_layer: weights are gathered where they are used (ZeRO-3).
        reduction: of gradients over devices.
        delayed: where a step's scales come from; None: from the tensors themselves.
    """

    sites: Mapping[str, Fp8Site]
    layouts: Mapping[str, ParamLayout]
    bf16: frozenset[tuple[int, str]]
    region: Region
    gathers_in_layer: bool
    reduction: Reduction
    delayed: DelayedScaling | None

    @property
    def products(self) -> list[str]:
        """Names of the products."""
        return sorted({site.name for site in self.sites.values()})

    def weights(self, stacked: Any, listed: Any, scales: Scales | None) -> Any:
        """``listed`` with the products' weights in FP8.

        Args:
            stacked: stored shards of the layers' parameters, layers in the first dimension.
            listed: the same, or as a list of layers.
            scales: per product ``[layers, 2]``, given scales of input and gradient; None: each is
                computed from the tensor.
        """
        largest: dict[str, jax.Array] = {}
        for name, w in _named(stacked).items():
            if name in self.sites:
                product = self.sites[name].name
                here = amax(w, first_axis=1)
                largest[product] = (
                    jnp.maximum(largest[product], here) if product in largest else here
                )
        products = sorted(largest)
        values = self._max(jnp.stack([largest[product] for product in products]))
        forward = next(iter(self.sites.values())).recipe.forward
        weight_scales = dict(zip(products, scale_of(values, forward), strict=True))

        def convert(path: Any, w: jax.Array, layer: int | None) -> Any:
            site = self.sites.get(_name(path))
            if site is None or (layer, site.name) in self.bf16:
                return w
            make = functools.partial(self._quantised, site, self.layouts[_name(path)])
            scale = weight_scales[site.name]
            given = None if scales is None else scales[site.name]
            if layer is None:
                return jax.vmap(make)(w, scale, given)
            return make(w, scale[layer], None if given is None else given[layer])

        def layer_weights(tree: Any, layer: int | None) -> Any:
            return jax.tree_util.tree_map_with_path(lambda p, w: convert(p, w, layer), tree)

        if isinstance(listed, list):
            return [layer_weights(tree, i) for i, tree in enumerate(listed)]
        return layer_weights(listed, None)

    def fetch(self, layout: ParamLayout, w: Fp8Weight) -> Fp8Weight:
        """A stored shard as a product uses it (ZeRO-3): gathered, with the gradient's scatter."""
        values = checkpoint_name(_gather_values(w.values, layout), GATHERED_WEIGHT)
        gradient = w.gradient
        if gradient is not None:
            shape = values.shape
            full = _full_gradient(gradient.weight, layout, self.reduction, shape)
            gradient = Fp8Gradient(full, gradient.amax)
        return Fp8Weight(values, None, w.scale, w.scales, gradient, w.site)

    def measured(self, grads: Any) -> Scales:
        """Largest magnitudes of every product's input and gradient ``[layers, 2]``, of all devices.

        Args:
            grads: gradients of the layers, in the form of :meth:`weights`.
        """
        trees = grads if isinstance(grads, list) else [grads]
        found: dict[str, list[jax.Array]] = {product: [] for product in self.products}
        for tree in trees:
            here: dict[str, jax.Array] = {}
            for name, g in _named(tree).items():
                if is_fp8_gradient(g):
                    here[self.sites[name].name] = g.amax
            for product, values in found.items():
                values.append(here.get(product, jnp.zeros(2)))
        stacked = {
            product: jnp.stack(values) if isinstance(grads, list) else values[0]
            for product, values in found.items()
        }
        largest = self._max(jnp.stack([stacked[product] for product in self.products]))
        return dict(zip(self.products, largest, strict=True))

    def _max(self, x: jax.Array) -> jax.Array:
        """Maximum over all devices that hold the same layers."""
        return self.region.max(x, [axis for axis in AXES if axis != "pipeline"])

    def _quantised(
        self,
        site: Fp8Site,
        layout: ParamLayout,
        w: jax.Array,
        scale: jax.Array,
        given: jax.Array | None,
    ) -> Fp8Weight:
        """One layer's weight."""
        values = quantise(w, scale, site.recipe.forward)
        transposed = None
        if not self.gathers_in_layer:
            values = _gather_values(values, layout)
            experts, dims = (0,) * site.experts, range(site.experts, values.ndim)
            order = (*experts, *dims[site.inputs :], *dims[: site.inputs])
            transposed = jnp.transpose(values, order)
        empty = Fp8Gradient(
            jnp.zeros(values.shape, jnp.float32), None if given is None else jnp.zeros(2)
        )
        return Fp8Weight(values, transposed, scale, given, empty, site)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: is_fp8(leaf) or is_fp8_gradient(leaf)
    )
    return {_name(path): leaf for path, leaf in leaves}


def _gather_values(values: jax.Array, layout: ParamLayout) -> jax.Array:
    """The whole weight's FP8 values from shards, which share one scale."""
    if not layout.zero_axes:
        return values
    return lax.all_gather(values, layout.zero_axes, axis=layout.zero_dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _full_gradient(
    shard: jax.Array, layout: ParamLayout, reduction: Reduction, shape: tuple[int, ...]
) -> jax.Array:
    """What the gradient of a gathered weight is taken by, so that it arrives in ``shard``."""
    return jnp.zeros(shape, jnp.float32)


def _full_gradient_fwd(
    shard: jax.Array, layout: ParamLayout, reduction: Reduction, shape: tuple[int, ...]
) -> tuple[jax.Array, None]:
    return jnp.zeros(shape, jnp.float32), None


def _full_gradient_bwd(
    layout: ParamLayout, reduction: Reduction, shape: tuple[int, ...], _: None, g: jax.Array
) -> tuple[jax.Array]:
    return (scatter_gradient(g, layout, reduction),)


_full_gradient.defvjp(_full_gradient_fwd, _full_gradient_bwd)
