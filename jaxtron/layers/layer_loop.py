"""The loop over consecutive layers: a scan or unrolled, with whole layers recomputed in groups."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.config.run import Recompute, TrainConfig
from jaxtron.errors import ConfigError
from jaxtron.layers.inputs import LayerNumber
from jaxtron.layers.outputs import LayerOutput
from jaxtron.layers.remat import Remat, remat_layer

Layer = Callable[[jax.Array, Any, LayerNumber], LayerOutput]
Block = Sequence[Layer]


def unrolls(train: TrainConfig, platform: str, *, layers_differ: bool) -> bool:
    """Whether the loop over layers is unrolled.

    On GPUs it is unless activations are offloaded: compiled for an H100, an unrolled loop held as
    many bytes on the device with offload as without (docs/performance.md).

    Args:
        train: whose ``layer_loop`` and ``recompute`` count.
        platform: of the devices.
        layers_differ: the layers are no single program.

    Raises:
        ConfigError: activations are offloaded on a GPU, but the loop must be unrolled.
    """
    offloaded = [
        name
        for name, action in (train.recompute.items() if isinstance(train.recompute, dict) else ())
        if action == "offload"
    ]
    gpu = platform != "cpu"
    if gpu and offloaded and (train.layer_loop == "unroll" or layers_differ):
        cause = "train.layer_loop is unroll"
        if layers_differ:
            cause = "precision.* keeps products of single layers out of FP8, which unrolls the loop"
        raise ConfigError(
            f"train.recompute offloads {', '.join(offloaded)}, but {cause}: an unrolled loop frees "
            "no GPU memory by it. Use recompute in place of offload, or a scan "
            "(train.layer_loop auto or scan, without FP8 exceptions of single layers)"
        )
    if train.layer_loop != "auto":
        return train.layer_loop == "unroll"
    return layers_differ or (gpu and not offloaded)


def run_layers(
    block: Block, x: jax.Array, layers: Any, remat: Remat, first: LayerNumber = 0
) -> LayerOutput:
    """Send the residual stream ``x`` through consecutive layers.

    What is stacked are blocks, of one layer in most models; where they have several, "layers" below
    are blocks, and only ``recompute: full`` without a method and activations by name go by layer.

    ``recompute: full`` has Megatron's two forms. ``uniform`` cuts the layers into groups of
    ``num_layers`` (the last may be smaller); of a group only its input is kept, and its layers are
    recomputed together. ``block`` recomputes the first ``num_layers`` layers one by one and keeps
    all activations of the rest. On a pipeline both count the layers of one chunk of a stage.

    Args:
        block: the layers of a block, each ``(x, the block's weights, the block's number) ->
            output``; they gather ZeRO-3 weights themselves.
        x: ``[b, s/tensor, h]``.
        layers: a list of one tree of weights a layer (the loop is unrolled), or one tree of leaves
            stacked in their first dimension (the loop is a scan).
        remat: what is kept and what recomputed.
        first: number of the first of these layers in the whole model.
    """
    total = len(layers) if isinstance(layers, list) else jax.tree.leaves(layers)[0].shape[0]
    if total == 0:
        return LayerOutput(x)
    numbers = jnp.arange(total, dtype=jnp.int32) + first
    if remat.method == "uniform":
        return _run_groups(block, x, layers, numbers, remat, min(remat.num_layers or 1, total))
    parts: list[tuple[range, Recompute]]
    if remat.method == "block":
        head = min(remat.num_layers or 1, total)
        parts = [(range(head), "full"), (range(head, total), "none")]
    else:
        parts = [(range(total), remat.recompute)]
    scanned = not isinstance(layers, list)
    outputs = []
    for where, recompute in parts:
        if where:
            wrapped = [
                remat_layer(
                    layer,
                    recompute,
                    drop_gathered=remat.drop_gathered,
                    apart=scanned or remat.passes_apart,
                )
                for layer in block
            ]
            outputs.append(_loop(wrapped, x, _cut(layers, where), _cut(numbers, where)))
            x = outputs[-1].x
    return _join(outputs)


def _cut(layers: Any, where: range) -> Any:
    """Some consecutive layers, in the form of ``layers``."""
    start, stop = where.start, where.stop
    if isinstance(layers, list):
        return layers[start:stop]
    return jax.tree.map(lambda a: a if len(where) == len(a) else a[start:stop], layers)


def _join(outputs: list[LayerOutput]) -> LayerOutput:
    """Output of several stretches of layers, one after the other."""
    if len(outputs) == 1:
        return outputs[0]
    report = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(o.report for o in outputs))
    return LayerOutput(outputs[-1].x, sum(o.piece for o in outputs), report)


def _run_block(block: Block, x: jax.Array, weights: Any, number: LayerNumber) -> LayerOutput:
    """Apply a block's layers; reports of several are those of its layers with one, stacked."""
    if len(block) == 1:
        return block[0](x, weights, number)
    piece: Any = 0.0
    reports = []
    for layer in block:
        x, more, report = layer(x, weights, number)
        piece = piece + more
        reports += [report] if jax.tree.leaves(report) else []
    return LayerOutput(x, piece, jax.tree.map(lambda *each: jnp.stack(each), *reports))


def _loop(block: Block, x: jax.Array, layers: Any, numbers: jax.Array) -> LayerOutput:
    """Apply ``block`` with each of the weights ``layers``."""
    if isinstance(layers, list):
        piece: Any = 0.0
        reports = []
        # traced and differentiated once for all layers
        one = jax.jit(functools.partial(_run_block, block), inline=True)
        for i, weights in enumerate(layers):
            x, more, report = one(x, weights, numbers[i])
            piece = piece + more
            reports.append(report)
        return LayerOutput(x, piece, jax.tree.map(lambda *each: jnp.stack(each), *reports))

    def body(carry: Any, each: Any) -> Any:
        x, piece = carry
        x, more, report = _run_block(block, x, *each)
        return (x, piece + more), report

    (x, piece), report = lax.scan(body, (x, jnp.zeros(())), (layers, numbers))
    return LayerOutput(x, piece, report)


def _run_groups(
    block: Block, x: jax.Array, layers: Any, numbers: jax.Array, remat: Remat, size: int
) -> LayerOutput:
    """All layers in groups of ``size``, each group wrapped as a whole.

    While a group is recomputed its layers keep their activations, but not gathered weights.
    """
    total = len(numbers)
    scanned = not isinstance(layers, list)
    wrap = functools.partial(remat_layer, drop_gathered=remat.drop_gathered)
    apart = scanned or remat.passes_apart
    block = [wrap(layer, "none", apart=apart) for layer in block]
    group = wrap(functools.partial(_loop, block), "full", apart=apart)
    outputs = []
    start = 0
    if scanned:
        start = total // size * size
        stacked = jax.tree.map(
            lambda a: a.reshape(-1, size, *a.shape[1:]), _cut((layers, numbers), range(start))
        )

        def body(carry: Any, each: Any) -> Any:
            out = group(carry[0], *each)
            return (out.x, carry[1] + out.piece), out.report

        (x, piece), report = lax.scan(body, (x, jnp.zeros(())), stacked)
        report = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), report)
        outputs.append(LayerOutput(x, piece, report))
        group = wrap(functools.partial(_loop, block), "full", apart=remat.passes_apart)
    for first in range(start, total, size):
        where = range(first, min(first + size, total))
        outputs.append(group(x, _cut(layers, where), _cut(numbers, where)))
        x = outputs[-1].x
    return _join(outputs)
