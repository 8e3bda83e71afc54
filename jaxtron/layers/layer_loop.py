"""The loop over a model's layers: a scan or unrolled, with whole layers recomputed in groups."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.config.run import Recompute
from jaxtron.layers.inputs import LayerNumber
from jaxtron.layers.remat import Remat, remat_layer

Layer = Callable[[jax.Array, Any, LayerNumber], jax.Array]


def run_layers(layer: Layer, x: jax.Array, layers: Any, remat: Remat) -> jax.Array:
    """Send the residual stream ``x`` through all layers.

    ``recompute: full`` has Megatron's two forms. ``uniform`` cuts the layers into groups of
    ``num_layers`` (the last may be smaller); of a group only its input is kept, and its layers are
    recomputed together. ``block`` recomputes the first ``num_layers`` layers one by one and keeps
    all activations of the rest.

    Args:
        layer: ``(x, weights, number) -> x``; gathers ZeRO-3 weights itself.
        x: ``[b, s/tensor, h]``.
        layers: a list of one tree of weights a layer (the loop is unrolled), or one tree of leaves
            stacked in their first dimension (the loop is a scan).
        remat: what is kept and what recomputed.
    """
    total = len(layers) if isinstance(layers, list) else jax.tree.leaves(layers)[0].shape[0]
    if remat.method == "uniform":
        return _run_groups(layer, x, layers, remat, total, min(remat.num_layers or 1, total))
    if remat.method == "block":
        first = min(remat.num_layers or 1, total)
        x = _run(layer, x, layers, range(first), remat, "full")
        return _run(layer, x, layers, range(first, total), remat, "none")
    return _run(layer, x, layers, range(total), remat, remat.recompute)


def _cut(layers: Any, numbers: range) -> Any:
    """Weights of some consecutive layers, in the form of ``layers``."""
    start, stop = numbers.start, numbers.stop
    if isinstance(layers, list):
        return layers[start:stop]
    return jax.tree.map(lambda a: a if len(numbers) == len(a) else a[start:stop], layers)


def _run(
    layer: Layer, x: jax.Array, layers: Any, numbers: range, remat: Remat, recompute: Recompute
) -> jax.Array:
    """Layers ``numbers``, each wrapped by itself."""
    scanned = not isinstance(layers, list)
    layer = remat_layer(layer, recompute, drop_gathered=remat.drop_gathered, in_scan=scanned)
    return _loop(layer, x, _cut(layers, numbers), numbers) if numbers else x


def _loop(layer: Layer, x: jax.Array, layers: Any, numbers: range | jax.Array) -> jax.Array:
    """Apply ``layer`` to each of ``layers``."""
    if isinstance(layers, list):
        for number, weights in zip(numbers, layers, strict=True):
            x = layer(x, weights, number)
        return x
    numbers = jnp.asarray(numbers, jnp.int32)
    return lax.scan(lambda x, each: (layer(x, *each), None), x, (layers, numbers))[0]


def _run_groups(
    layer: Layer, x: jax.Array, layers: Any, remat: Remat, total: int, size: int
) -> jax.Array:
    """All layers in groups of ``size``, each group wrapped as a whole.

    While a group is recomputed its layers keep their activations, but not gathered weights.
    """
    scanned = not isinstance(layers, list)
    wrap = functools.partial(remat_layer, drop_gathered=remat.drop_gathered)
    layer = wrap(layer, "none", in_scan=scanned)
    group = wrap(functools.partial(_loop, layer), "full", in_scan=scanned)
    whole = total // size * size
    if scanned:
        stacked = jax.tree.map(
            lambda a: a.reshape(-1, size, *a.shape[1:]),
            (_cut(layers, range(whole)), jnp.arange(whole, dtype=jnp.int32)),
        )
        x, _ = lax.scan(lambda x, each: (group(x, *each), None), x, stacked)
        starts = range(whole, total, size)
        # outside of the scan
        group = wrap(functools.partial(_loop, layer), "full", in_scan=False)
    else:
        starts = range(0, total, size)
    for start in starts:
        numbers = range(start, min(start + size, total))
        x = group(x, _cut(layers, numbers), jnp.arange(numbers.start, numbers.stop))
    return x
