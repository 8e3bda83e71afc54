"""Loss and gradients of a step's microbatches, inside the manual region."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.layers.activation_names import GATHERED_WEIGHT
from jaxtron.parallel.computation import Computation
from jaxtron.parallel.config import DataSharding
from jaxtron.parallel.data_sharding import (
    gather_copy,
    gather_weight,
    scatter_gradient,
    sum_gradient,
)
from jaxtron.parallel.gradient_sum import (
    accumulate,
    check_uses,
    trainable,
    with_sums,
    with_trainable,
    zero_gradients,
)
from jaxtron.parallel.overlap import NO_OVERLAP, Overlap
from jaxtron.parallel.param_layout import ParamLayout, is_layout
from jaxtron.parallel.reduction import Reduction
from jaxtron.parallel.region import Region
from jaxtron.precision.fp8_delayed import Scales
from jaxtron.precision.fp8_plan import Fp8Plan
from jaxtron.precision.fp8_weight import is_fp8, map_gradients, weight_gradients

Params = dict[str, Any]

_CONCATENATION_OF_ITS_OWN = 4  # arrays; see stack_layers


def _split(microbatches: Any) -> list[Any]:
    """Trees of single microbatches of arrays with a leading microbatch axis."""
    count = jax.tree.leaves(microbatches)[0].shape[0]
    return [jax.tree.map(lambda a, i=i: a[i], microbatches) for i in range(count)]


def _map(f: Callable[..., Any], layouts: Any, *trees: Any) -> Any:
    return jax.tree.map(f, layouts, *trees, is_leaf=is_layout)


@dataclass(frozen=True)
class GradientPlan:
    """How parameters become copies for compute and gradients become stored shards.

    Attributes:
        layouts: a :class:`ParamLayout` per parameter, parts at the top.
        region: the manual region.
        data_sharding: ``parallel.data_sharding``.
        reduction: of gradients over devices.
        accumulate_dtype: dtype of gradient sums over microbatches.
        unroll: whether the layer loop is unrolled; copies then hold a list of layers.
        fp8: FP8 in the layers, or None.
        sums_itself: names (``embedding/word``) of weights whose gradients the model can add to
            the step's sums itself (:class:`jaxtron.parallel.gradient_sum.SummedWeight`).
    """

    layouts: Params
    region: Region
    data_sharding: DataSharding
    reduction: Reduction
    accumulate_dtype: Any
    unroll: bool
    fp8: Fp8Plan | None = None
    sums_itself: tuple[str, ...] = ()

    @property
    def summed(self) -> tuple[str, ...]:
        """Names of weights whose gradients are added to the step's sums where they arise.

        None where a microbatch's gradients are scattered before they are added, or sums are not
        fp32: a word that comes hundreds of times would stop counting. None of the layers in a scan,
        which would copy a layer's sum out of the stack and back.
        """
        if self.accumulate_dtype != jnp.float32 or not self._scatters_at_the_end:
            return ()
        return tuple(
            name for name in self.sums_itself if self.unroll or not name.startswith("layers/")
        )

    @property
    def gathers_in_layer(self) -> bool:
        """Whether weights are gathered where they are used (ZeRO-3)."""
        return self.data_sharding == "optim_grads_params"

    @property
    def _scatters_at_the_end(self) -> bool:
        """Whether whole gradients are accumulated over microbatches, and scattered once."""
        return self.data_sharding in ("no_shard", "optim")

    def _listed(self, tree: Params) -> Params:
        """Stacked layers as a list of layers, when the loop is unrolled."""
        if not self.unroll:
            return tree
        count = jax.tree.leaves(tree["layers"])[0].shape[0]
        layers = [jax.tree.map(lambda a, i=i: a[i], tree["layers"]) for i in range(count)]
        return {**tree, "layers": layers}

    def listed_layouts(self, count: int) -> Params:
        """Layouts in the form of the copies of ``count`` layers."""
        if not self.unroll:
            return self.layouts
        layer = _map(ParamLayout.unstacked, self.layouts["layers"])
        return {**self.layouts, "layers": [layer] * count}

    @jax.named_scope("weights")
    def copies(self, params: Params, scales: Scales | None = None) -> Params:
        """What layers read: gathered copies, or under ZeRO-3 the stored shards.

        ``scales`` of FP8 inputs and gradients; None: from the tensors themselves.
        """
        listed = self._listed(params)
        layouts = self.listed_layouts(len(listed["layers"]))
        if self.fp8 is not None:
            layers = self.fp8.weights(params["layers"], listed["layers"], scales)
            listed = {**listed, "layers": layers}

        def copy(layout: ParamLayout, w: Any) -> Any:
            return w if self.gathers_in_layer or is_fp8(w) else gather_copy(w, layout)

        return _map(copy, layouts, listed)

    @jax.named_scope("weights")
    def fetch(self, part: str, weights: Params) -> Params:
        """Weights of ``part`` as a layer uses them; see :class:`jaxtron.models.decoder.Decoder`.

        A part of a part is spelled ``layers/layer_1``.
        """
        if not self.gathers_in_layer:
            return weights
        layouts = self.layouts
        for name in part.split("/"):
            layouts = layouts[name]
        if part.split("/")[0] == "layers":
            layouts = _map(ParamLayout.unstacked, layouts)

        def gathered(layout: ParamLayout, w: Any) -> Any:
            if self.fp8 is not None and is_fp8(w):
                return self.fp8.fetch(layout, w)
            return checkpoint_name(gather_weight(w, layout, self.reduction), GATHERED_WEIGHT)

        return _map(gathered, layouts, weights)

    def scatter(self, g: Any, layouts: Any) -> Any:
        """Gradients of copies as stored shards, fp32; not yet summed over ``replicated_axes``."""
        if self.gathers_in_layer:  # the transpose of the gather has scattered them
            return map_gradients(lambda a: a.astype(jnp.float32), g)
        return map_gradients(lambda a, lay: scatter_gradient(a, lay, self.reduction), g, layouts)

    @jax.named_scope("gradient_reduce")
    def after_microbatch(self, g: Any, layouts: Any) -> Any:
        """What is done to one microbatch's gradients of copies before they are accumulated."""
        if not self._scatters_at_the_end:
            return self.scatter(g, layouts)
        return map_gradients(lambda a, lay: lay.as_matrix(a), g, layouts)

    def measured(self, grads: Params, scales: Scales | None) -> Scales:
        """Largest magnitudes of FP8 inputs and gradients, if ``scales`` were given."""
        if self.fp8 is None or scales is None:
            return {}
        return self.fp8.measured(grads["layers"])

    @jax.named_scope("gradient_reduce")
    def finish(self, grads: Params) -> Params:
        """Accumulated gradients as stored shards, summed over all devices, layers stacked."""
        layouts = self.listed_layouts(len(grads["layers"]))
        if self._scatters_at_the_end:
            sizes = self.region.sizes
            grads = map_gradients(
                lambda a, lay: a if lay.stacked else a.reshape(lay.copy_shape(sizes)),
                grads,
                layouts,
            )
            grads = self.scatter(grads, layouts)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), weight_gradients(grads))
        grads = _map(
            lambda lay, g: sum_gradient(g, lay, self.region, self.reduction), layouts, grads
        )
        if self.unroll:
            stacked = jax.tree.map(stack_layers, *grads["layers"])
            grads = {**grads, "layers": stacked}
        return grads


def stack_layers(*layers: jax.Array) -> jax.Array:
    """``jnp.stack``, of pieces of the layers where these are few.

    XLA fuses the optimizer's update with a concatenation. One of up to four arrays has an emitter
    of its own, which gives one result: parameter and both moments are then updated one after the
    other, by 44 bytes a parameter instead of 28, and a moment is copied. (XLA's algebraic
    simplifier would join the pieces again if it knew where they begin.)
    """
    pieces = 1
    while 1 < len(layers) * pieces <= _CONCATENATION_OF_ITS_OWN:
        pieces *= 2
    rows = layers[0].shape[0] if layers[0].ndim > 1 else 0
    if pieces == 1 or not rows or rows % pieces:
        return jnp.stack(layers)
    size = rows // pieces
    zero = lax.optimization_barrier(jnp.int32(0))
    cut = functools.partial(lax.dynamic_slice_in_dim, slice_size=size)
    parts = [cut(layer, zero + n * size) for layer in layers for n in range(pieces)]
    return jnp.concatenate(parts).reshape(len(layers), *layers[0].shape)


@dataclass(frozen=True)
class Sequential:
    """Runs a step's microbatches in their order, all layers on every device.

    Attributes:
        plan: of the gradients.
        at_once: microbatches in one turn of the loop, none of which waits for another; their
            gradients are added one by one, in the same order as without.
        overlap: which microbatches stand outside of the loop.
    """

    plan: GradientPlan
    at_once: int = 1
    overlap: Overlap = NO_OVERLAP

    def value_and_gradients(
        self,
        computation: Computation,
        params: Params,
        microbatches: Any,
        count: jax.Array | None = None,
        scales: Scales | None = None,
    ) -> tuple[Any, Params, Scales]:
        """Sum over microbatches of what the computation reports, and the reduced gradients.

        Args:
            computation: of one microbatch.
            params: stored shards.
            microbatches: arrays with a leading microbatch axis.
            count: how many of them to compute, from the first on, alike on all devices; None: all.
            scales: of FP8 inputs and gradients; None: from the tensors themselves.

        Returns:
            ``(reports, gradients, measured)``: reports of head and layers, summed over
            microbatches, not over devices; gradients as stored shards, fp32, summed over all
            devices; given ``scales``, the largest magnitudes that the step had in their place.
        """
        plan = self.plan
        copies = plan.copies(params, scales)
        layouts = plan.listed_layouts(len(copies["layers"]))

        def one(microbatch: Any, earlier: Any = None, total: Any = None) -> tuple[Params, Any]:
            """Gradients and reports; of weights that carry a sum out of ``total``, the sum."""
            weights = copies if total is None else with_sums(copies, total, plan.summed)
            gradient = jax.grad(
                lambda part: computation.objective(
                    with_trainable(weights, part), microbatch, earlier
                ),
                has_aux=True,
            )
            g, reports = gradient(trainable(weights))
            check_uses(weights)
            return plan.after_microbatch(g, layouts), reports

        first = jax.tree.map(lambda a: a[0], microbatches)
        if count is None and jax.tree.leaves(microbatches)[0].shape[0] == 1:
            grads, reports = one(first)
        else:
            grad_shapes, report_shapes = jax.eval_shape(one, first)
            start = (
                zero_gradients(grad_shapes, plan.accumulate_dtype),
                jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), report_shapes),
            )

            def body(total: Any, microbatch: Any) -> Any:
                earlier = total[1][1] if computation.looks_back else None
                g, reports = one(microbatch, earlier, total[0])
                return accumulate(total[0], g, plan.summed), accumulate(total[1], reports)

            def turn(total: Any, several: Any) -> Any:
                each = _split(several)
                if computation.looks_back or len(each) == 1:
                    return functools.reduce(body, each, total)
                return functools.reduce(accumulate, map(one, each), total)

            if count is None:
                grads, reports = self._loop(turn, start, microbatches)
            else:

                def numbered(length: int, i: jax.Array, total: Any) -> Any:
                    several = jax.tree.map(
                        lambda a: lax.dynamic_slice_in_dim(a, i * length, length), microbatches
                    )
                    return turn(total, several)

                turns, step = count // self.at_once, functools.partial(numbered, self.at_once)
                grads, reports = lax.fori_loop(0, turns, step, start)
                if self.at_once > 1:
                    alone = functools.partial(numbered, 1)
                    rest = (turns * self.at_once, count, alone, (grads, reports))
                    grads, reports = lax.fori_loop(*rest)
        return reports, plan.finish(grads), plan.measured(grads, scales)

    def _loop(self, turn: Callable[..., Any], total: Any, microbatches: Any) -> Any:
        """``total`` after ``turn`` has added all microbatches to it, ``at_once`` at a time.

        What does not fill a turn comes first, in one of its own.
        """
        count, size = jax.tree.leaves(microbatches)[0].shape[0], self.at_once
        head = count % size or size * int(self.overlap.param_gather)
        tail = max(head, count - size * int(self.overlap.grad_reduce))
        if head:
            total = turn(total, jax.tree.map(lambda a: a[:head], microbatches))
        if head < tail:
            middle = jax.tree.map(
                lambda a: a[head:tail].reshape(-1, size, *a.shape[1:]), microbatches
            )
            total, _ = lax.scan(lambda total, each: (turn(total, each), None), total, middle)
        if tail < count:
            # else its forward pass would go ahead, and its activations lie beside the others'
            microbatches, total = lax.optimization_barrier((microbatches, total))
            total = turn(total, jax.tree.map(lambda a: a[tail:], microbatches))
        return total

    def reports(self, computation: Computation, params: Params, microbatches: Any) -> Any:
        """Sum over microbatches of what the head reports; forward passes alone."""
        copies = self.plan.copies(params)

        def one(microbatch: Any) -> Any:
            return computation.objective(copies, microbatch)[1][0]

        first = jax.tree.map(lambda a: a[0], microbatches)
        if jax.tree.leaves(microbatches)[0].shape[0] == 1:
            return one(first)
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, first))
        return lax.scan(
            lambda total, each: (jax.tree.map(jnp.add, total, one(each)), None), start, microbatches
        )[0]
