"""Runs any schedule: one scan over its ticks, inside the manual region.

All stages go through the ticks together. What a stage does in a tick is a branch that only its own
devices take; what crosses stages stands outside of such branches:

- activations and gradients move on by collective-permutes (a permute inside a branch that only some
  devices take would wait for the others for ever);
- embedding and output layer are spread over the stages (their vocabulary is): all stages take the
  loss of the microbatch whose last layer was just computed, in a branch that they take together.

What the start of a tick can know travels while its forward pass computes: the gradients of the tick
before, to the stage before and to the embedding, and the embedding of the microbatch that enters in
the next tick.

The gradient of a unit of work begins with its forward pass's residuals out of a ring buffer;
nothing is computed twice unless ``train.recompute`` asks for it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.parallel.computation import Computation
from jaxtron.parallel.microbatches import GradientPlan, Params
from jaxtron.parallel.pipeline.layout import Placement
from jaxtron.parallel.pipeline.residuals import Ring, Stretch, read, write
from jaxtron.parallel.pipeline.schedule import Schedule, forward_schedule
from jaxtron.parallel.pipeline.table import head_gradients_wait, programs, tick_table
from jaxtron.precision.fp8_weight import accumulate, trainable, with_trainable, zero_gradients

AXIS = "pipeline"


def _add_at(start: int, total: jax.Array, part: jax.Array) -> jax.Array:
    """``total`` with ``part`` added to its rows from ``start`` on.

    No ``.at[...].add``: of a static slice that is a scatter with an empty index array, and Shardy
    (JAX 0.11) crashes on a manual region that reads one.
    """
    after = total.shape[0] - start - part.shape[0]
    return total + jnp.pad(part, [(start, after)] + [(0, 0)] * (total.ndim - 1))


class _Carry(NamedTuple):
    """What passes from tick to tick on a device."""

    x: jax.Array  # input of the next forward
    g: Any  # gradient of the last backward's input, still to be sent
    ring: Any  # residuals
    head_g: Any  # gradients from the head that wait for their backward
    layers: Any  # accumulated gradients of the stage's layers
    rest: Any  # accumulated gradients of the other parts
    head_report: Any
    layer_report: Any


@dataclass(frozen=True)
class Pipelined:
    """Runs a step's microbatches by a schedule; the counterpart of ``Sequential``.

    Attributes:
        plan: gathering of weights and reduction of gradients.
        schedule: of a training step.
        placement: layers of every stage and chunk.
    """

    plan: GradientPlan
    schedule: Schedule
    placement: Placement

    def value_and_gradients(
        self, computation: Computation, params: Params, microbatches: Any
    ) -> tuple[Any, Params]:
        """As :meth:`jaxtron.parallel.microbatches.Sequential.value_and_gradients`.

        Gradients and the layers' reports are those of the stage's own layers.
        """
        step = _Step(self, self.schedule, computation, params, microbatches, training=True)
        carry = step.run()
        grads = self.plan.finish({**carry.rest, "layers": carry.layers})
        return (carry.head_report, carry.layer_report), grads

    def reports(self, computation: Computation, params: Params, microbatches: Any) -> Any:
        """As :meth:`jaxtron.parallel.microbatches.Sequential.reports`."""
        count = jax.tree.leaves(microbatches)[0].shape[0]
        schedule = forward_schedule(self.schedule.stages, self.schedule.chunks, count)
        step = _Step(self, schedule, computation, params, microbatches, training=False)
        return step.run().head_report


class _Step:
    """The trace of one step."""

    def __init__(
        self,
        pipeline: Pipelined,
        schedule: Schedule,
        computation: Computation,
        params: Params,
        microbatches: Any,
        *,
        training: bool,
    ) -> None:
        self.plan, self.schedule = pipeline.plan, schedule
        self.computation, self.microbatches, self.training = computation, microbatches, training
        copies = self.plan.copies(params)
        self.rest = {part: copies[part] for part in copies if part != "layers"}
        self.layers = copies["layers"]
        layouts = self.plan.listed_layouts(len(self.layers))
        self.layouts = layouts["layers"]
        self.rest_layouts = {part: layouts[part] for part in self.rest}
        self.programs = programs(pipeline.placement)
        # sliced once, here: inside the loop a slice would count among the residuals
        self.weights = [self._cut(self.layers, *where) for where in self.programs.stretches]
        self.stretches = [Stretch() for _ in self.weights]
        self.ring = Ring(max(schedule.slots) if training else 0)
        self.stage = lax.axis_index(AXIS)
        self.waits = training and head_gradients_wait(schedule)

    # -- set-up --------------------------------------------------------------------------------

    def run(self) -> _Carry:
        """All ticks."""
        side = self._side(jnp.int32(0))
        word = self.computation.lookup(self.rest, side)
        # every schedule forwards the first microbatch in its first tick
        x = self.computation.embed(self.rest, side, lax.psum(word, AXIS))
        self.zero_x, self.zero_word = jnp.zeros_like(x), jnp.zeros_like(word)
        head_report = jax.eval_shape(lambda: self.computation.head(self.rest, side, self.zero_x)[1])
        layer_report = self._shapes(side)
        table = {k: jnp.asarray(v) for k, v in tick_table(self.schedule, self.programs).items()}
        start = _Carry(
            x=x,
            g=self.zero_x if self.training else (),
            ring=self.ring.zeros(),
            head_g=jnp.zeros((self.ring.slots, *x.shape), x.dtype) if self.waits else (),
            layers=self._zero_gradients(self.layers, self.layouts),
            rest=self._zero_gradients(self.rest, self.rest_layouts),
            head_report=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), head_report),
            layer_report=layer_report,
        )
        carry, _ = lax.scan(self._tick, start, table)
        return carry

    def _shapes(self, side: Any) -> Any:
        """Lay out the ring buffer; returns empty reports of the stage's layers."""
        listed = isinstance(self.layers, list)
        slots = len(self.layers) if listed else jax.tree.leaves(self.layers)[0].shape[0]
        report: Any = ()
        for k, (_, count) in enumerate(self.programs.stretches):
            if count == 0:
                continue
            _, aux, kept = jax.eval_shape(
                lambda k=k: self._linearise(k, self.zero_x, side, jnp.int32(0))
            )
            if self.training:
                self.stretches[k].entries = self.ring.assign(kept)
            report = jax.tree.map(lambda s: jnp.zeros((slots, *s.shape[1:]), s.dtype), aux)
        return report

    def _zero_gradients(self, copies: Any, layouts: Any) -> Any:
        if not self.training:
            return ()
        shapes = jax.eval_shape(lambda: self.plan.after_microbatch(trainable(copies), layouts))
        return zero_gradients(shapes, self.plan.accumulate_dtype)

    def _side(self, microbatch: jax.Array) -> Any:
        """Side arrays of a microbatch, given by its number."""
        index = jnp.maximum(microbatch, 0)
        return self.computation.side(
            jax.tree.map(
                lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), self.microbatches
            )
        )

    @staticmethod
    def _cut(layers: Any, start: int, count: int) -> Any:
        if isinstance(layers, list):
            return layers[start : start + count]
        whole = jax.tree.leaves(layers)[0].shape[0] == count
        return layers if whole else jax.tree.map(lambda a: a[start : start + count], layers)

    # -- one tick ------------------------------------------------------------------------------

    def _tick(self, carry: _Carry, row: dict[str, jax.Array]) -> tuple[_Carry, None]:
        own = {k: v[self.stage] if v.ndim else v for k, v in row.items()}
        entering = self._side(own["enters"])
        word = self.computation.lookup(self.rest, entering)
        received: Any = None
        at_embedding = word_g = received
        if self.training:
            received, at_embedding, word, word_g = self._move_gradients(word, carry.g, own)
        else:
            word = lax.psum(word, AXIS)
        y, ring, layer_report = self._forward(carry, own)
        last = lax.psum(jnp.where(own["f_ends"], y, 0), AXIS)
        embedded = self.computation.embed(self.rest, entering, word)
        x = jnp.where(own["next_begins"], embedded, self._send(y, +1))
        carry = carry._replace(x=x, ring=ring, layer_report=layer_report)
        carry, last_g = self._head(last, carry, own)
        if self.training:
            last_g = lax.psum(last_g, AXIS)
            carry = self._embedding_gradient(at_embedding, word_g, carry, own)
            carry = self._backward(received, last_g, carry, own)
        return carry, None

    def _move_gradients(self, word: jax.Array, g: jax.Array, own: dict[str, jax.Array]) -> Any:
        """Send the gradients of the tick before on their way.

        Returns ``(gradient of this tick's output, gradient at the embedding on the first stage,
        summed word, summed gradient of the words embedded before)``.
        """
        received = self._send(g, -1)
        left = self._side(own["left"])
        at_embedding = jnp.where(own["last_begins"], g, 0)
        _, of_word = jax.vjp(lambda x: self.computation.embed(self.rest, left, x), self.zero_word)
        # The barrier has the permute done before the sum, which goes first in the tick: left to
        # itself, XLA would start the permute only where its result is needed.
        received, word = lax.optimization_barrier((received, word))
        word, word_g = lax.psum((word, *of_word(at_embedding)), AXIS)
        return received, at_embedding, word, word_g

    def _embedding_gradient(
        self, at_embedding: Any, word_g: Any, carry: _Carry, own: dict[str, jax.Array]
    ) -> _Carry:
        """Add the embedding's gradients of the microbatch that left in the tick before."""
        left = self._side(own["left"])

        def accumulate() -> Any:
            def both(rest: Any) -> Any:
                embed, lookup = self.computation.embed, self.computation.lookup
                return embed(rest, left, self.zero_word), lookup(rest, left)

            (g_rest,) = jax.vjp(both, self.rest)[1]((at_embedding, word_g))
            return self._accumulate(carry.rest, g_rest, self.rest_layouts)

        return carry._replace(rest=lax.cond(own["left"] >= 0, accumulate, lambda: carry.rest))

    def _send(self, x: jax.Array, step: int) -> jax.Array:
        """Hand ``x`` to the next stage (step 1) or the previous one (step -1)."""
        p = self.schedule.stages
        pairs = [(i, (i + step) % p) for i in range(p)]
        if self.schedule.chunks == 1:  # nothing goes around
            pairs = [(i, j) for i, j in pairs if j == i + step]
        return lax.ppermute(x, AXIS, pairs)

    def _linearise(self, k: int, x: jax.Array, side: Any, first: jax.Array) -> Any:
        """Forward pass of a stretch: ``(output, report, residuals)``."""

        def function(part: Any, x: jax.Array) -> Any:
            weights = with_trainable(self.weights[k], part)
            out = self.computation.layers(weights, side, x, first)
            return (out.x, jnp.asarray(out.piece, jnp.float32)), out.report

        part = trainable(self.weights[k])
        if not self.training:
            (y, _), report = function(part, x)
            return y, report, []
        known = jax.tree.leaves((self.weights[k], side))
        (y, _), report, kept = self.stretches[k].forward(function, (part, x), known)
        return y, report, kept

    def _forward(self, carry: _Carry, own: dict[str, jax.Array]) -> Any:
        x = carry.x
        side = self._side(own["f_microbatch"])

        def branch(k: int) -> Callable[[], Any]:
            start, count = self.programs.stretches[k]

            def run() -> Any:
                if count == 0:
                    return x, carry.ring, carry.layer_report
                y, report, kept = self._linearise(k, x, side, own["f_first"])
                ring = write(carry.ring, self.stretches[k], kept, own["f_slot"])
                total = jax.tree.map(functools.partial(_add_at, start), carry.layer_report, report)
                return y, ring, total

            return run

        idle = lambda: (self.zero_x, carry.ring, carry.layer_report)  # noqa: E731
        return lax.switch(own["f_branch"], [idle, *map(branch, range(len(self.weights)))])

    def _head(self, x: jax.Array, carry: _Carry, own: dict[str, jax.Array]) -> Any:
        """Loss of the microbatch that has left the last stage, on all stages together.

        Returns ``(carry, gradient of x)``; the latter is this stage's share.
        """

        def objective(rest: Any, x: jax.Array) -> Any:
            return self.computation.head(rest, self._side(own["head"]), x)

        def evaluate() -> Any:
            if not self.training:
                report = objective(self.rest, x)[1]
                return jax.tree.map(jnp.add, carry.head_report, report), (), ()
            value, vjp, report = jax.vjp(objective, self.rest, x, has_aux=True)
            g_rest, g_x = vjp(jnp.ones_like(value))
            return (
                jax.tree.map(jnp.add, carry.head_report, report),
                self._accumulate(carry.rest, g_rest, self.rest_layouts),
                g_x,
            )

        skip = lambda: (carry.head_report, carry.rest, self.zero_x if self.training else ())  # noqa: E731
        head_report, rest, g = lax.cond(own["head"] >= 0, evaluate, skip)
        return carry._replace(head_report=head_report, rest=rest), g

    def _backward(
        self, received: jax.Array, last_g: jax.Array, carry: _Carry, own: dict[str, jax.Array]
    ) -> _Carry:
        """Gradients of a unit."""
        if self.waits:
            slot = own["f_slot"]
            old = lax.dynamic_index_in_dim(carry.head_g, slot, 0, keepdims=False)
            new = jnp.where(own["f_ends"], last_g, old)
            head_g = lax.dynamic_update_index_in_dim(carry.head_g, new, slot, 0)
            carry = carry._replace(head_g=head_g)
            last_g = lax.dynamic_index_in_dim(head_g, own["b_slot"], 0, keepdims=False)
        g = jnp.where(own["b_ends"], last_g, received)
        side = self._side(own["b_microbatch"])

        def branch(k: int) -> Callable[[], Any]:
            start, count = self.programs.stretches[k]

            def run() -> Any:
                if count == 0:
                    return g, carry.layers
                stretch = self.stretches[k]
                known = jax.tree.leaves((self.weights[k], side))
                kept = read(carry.ring, stretch, own["b_slot"])
                g_weights, g_x = stretch.backward((g, jnp.float32(1)), known, kept)
                old = self._cut(carry.layers, start, count)
                new = self._accumulate(old, g_weights, self._cut_layouts(start, count))
                return g_x, _put(carry.layers, new, start, count)

            return run

        idle = lambda: (self.zero_x, carry.layers)  # noqa: E731
        g_x, layers = lax.switch(own["b_branch"], [idle, *map(branch, range(len(self.weights)))])
        return carry._replace(g=g_x, layers=layers)

    def _cut_layouts(self, start: int, count: int) -> Any:
        listed = isinstance(self.layouts, list)
        return self.layouts[start : start + count] if listed else self.layouts

    def _accumulate(self, total: Any, g: Any, layouts: Any) -> Any:
        return accumulate(total, self.plan.after_microbatch(g, layouts))


def _put(layers: Any, new: Any, start: int, count: int) -> Any:
    """``layers`` with some of them replaced."""
    if isinstance(layers, list):
        return [*layers[:start], *new, *layers[start + count :]]
    return jax.tree.map(
        lambda a, n: n if len(n) == len(a) else lax.dynamic_update_slice_in_dim(a, n, start, 0),
        layers,
        new,
    )
