"""One step by any schedule: a scan over the ticks of each of its phases.

See :mod:`jaxtron.parallel.pipeline.executor`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.parallel.computation import Computation
from jaxtron.parallel.gradient_sum import (
    accumulate,
    check_uses,
    trainable,
    with_sums,
    with_trainable,
    zero_gradients,
)
from jaxtron.parallel.microbatches import GradientPlan, Params
from jaxtron.parallel.pipeline.layout import Placement
from jaxtron.parallel.pipeline.residuals import Ring, Stretch, read, write
from jaxtron.parallel.pipeline.schedule import Schedule
from jaxtron.parallel.pipeline.table import (
    Phase,
    head_gradients_wait,
    phases,
    programs,
    tick_table,
)
from jaxtron.precision.fp8_delayed import Scales
from jaxtron.precision.fp8_weight import Fp8Gradient, is_fp8_gradient

AXIS = "pipeline"


def _add_at(start: int, total: jax.Array, part: jax.Array) -> jax.Array:
    """``total`` with ``part`` added to its rows from ``start`` on.

    No ``.at[...].add``: of a static slice that is a scatter with an empty index array, and Shardy
    (JAX 0.11) crashes on a manual region that reads one.
    """
    after = total.shape[0] - start - part.shape[0]
    return total + jnp.pad(part, [(start, after)] + [(0, 0)] * (total.ndim - 1))


class Carry(NamedTuple):
    """What passes from tick to tick on a device."""

    x: jax.Array  # input of the next forward
    g: Any  # gradient of the last backward's input, still to be sent
    ring: Any  # residuals
    head_g: Any  # gradients from the head that wait for their backward
    layers: Any  # accumulated gradients of the stage's layers
    rest: Any  # accumulated gradients of the other parts
    head_report: Any
    layer_report: Any


class Step:
    """The trace of one step.

    Args:
        plan: gathering of weights and reduction of gradients.
        placement: layers of every stage and chunk.
        schedule: of the step.
        computation: of one microbatch.
        params: stored shards.
        microbatches: arrays with a leading microbatch axis.
        training: whether gradients are wanted.
        scales: of FP8 inputs and gradients; None: from the tensors themselves.
    """

    def __init__(
        self,
        plan: GradientPlan,
        placement: Placement,
        schedule: Schedule,
        computation: Computation,
        params: Params,
        microbatches: Any,
        training: bool,
        scales: Scales | None,
    ) -> None:
        self.plan, self.schedule = plan, schedule
        self.computation, self.microbatches, self.training = computation, microbatches, training
        copies = self.plan.copies(params, scales)
        self.rest = {part: copies[part] for part in copies if part != "layers"}
        self.layers = copies["layers"]
        layouts = self.plan.listed_layouts(len(self.layers))
        self.layouts = layouts["layers"]
        self.rest_layouts = {part: layouts[part] for part in self.rest}
        self.programs = programs(placement)
        # sliced once, here: inside the loop a slice would count among the residuals
        self.weights = [self._cut(self.layers, *where) for where in self.programs.stretches]
        self.stretches = [Stretch() for _ in self.weights]
        self.branches = len(self.weights) > 1
        self.table = tick_table(schedule, self.programs)
        self.ring = Ring(1 + int(self.table["f_slot"].max()) if training else 0)
        self.stage = lax.axis_index(AXIS)
        self.waits = training and head_gradients_wait(schedule)

    # -- set-up --------------------------------------------------------------------------------

    def run(self) -> Carry:
        """All ticks, phase by phase."""
        side = self._side(jnp.int32(0))
        word = self.computation.lookup(self.rest, side)
        # every schedule forwards the first microbatch in its first tick
        x = self.computation.embed(self.rest, side, lax.psum(word, AXIS))
        self.zero_x, self.zero_word = jnp.zeros_like(x), jnp.zeros_like(word)
        head_report = jax.eval_shape(lambda: self.computation.head(self.rest, side, self.zero_x)[1])
        layer_report = self._shapes(side)
        carry = Carry(
            x=x,
            g=self.zero_x if self.training else (),
            ring=self.ring.zeros(),
            head_g=jnp.zeros((self.ring.slots, *x.shape), x.dtype) if self.waits else (),
            layers=self._zero_gradients(self.layers, self.layouts),
            rest=self._zero_gradients(self.rest, self.rest_layouts),
            head_report=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), head_report),
            layer_report=layer_report,
        )
        for phase in phases(self.schedule, self.table):
            rows = {k: jnp.asarray(v) for k, v in phase.table.items()}
            carry, _ = lax.scan(functools.partial(self._tick, phase), carry, rows)
        return self._last_embedding_gradient(carry) if self.training else carry

    def _shapes(self, side: Any) -> Any:
        """Lay out the ring buffer; returns empty reports of the stage's layers."""
        listed = isinstance(self.layers, list)
        slots = len(self.layers) if listed else jax.tree.leaves(self.layers)[0].shape[0]
        report: Any = ()
        for k, (_, count) in enumerate(self.programs.stretches):
            if count == 0:
                continue
            start = functools.partial(self._linearise, k, self.zero_x, side, jnp.int32(0))
            _, aux, kept = jax.eval_shape(start)
            if self.computation.looks_back:
                _, aux, kept = jax.eval_shape(start, aux)
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

    def _tick(self, phase: Phase, carry: Carry, row: dict[str, jax.Array]) -> tuple[Carry, None]:
        own = {k: v[self.stage] if v.ndim else v for k, v in row.items()}
        leaves = phase.backward and phase.share("left") > 0
        received: Any = self._send(carry.g, -1) if phase.backward else None
        at_embedding: Any = jnp.where(own["last_begins"], carry.g, 0) if leaves else None
        left: Any = self._word_that_left(own["left"]) if leaves else None
        words = self._words(phase, at_embedding, left, own)
        last_g: Any = None

        def add_left(word_g: jax.Array, total: Any) -> Any:
            """With the embedding's gradients of the microbatch that left, zeros without one."""
            return self._add_embedding_gradient(at_embedding, left, word_g, own["left"], total)

        together = phase.forward and leaves and phase.within("left", "head")
        if phase.forward:
            y, kept, carry = self._forward(carry, own)
            received, words, y = lax.optimization_barrier((received, words, y))
            sent = self._send(y, +1)
            also = functools.partial(add_left, words[0]) if together else None
            carry, last_g = self._head(phase, y, kept, also, carry, own)
            embedded = self.computation.embed(self.rest, self._side(own["enters"]), words[-1])
            carry = carry._replace(x=jnp.where(own["next_begins"], embedded, sent))
        if leaves and not together:
            add = functools.partial(add_left, words[0], carry.rest)
            rest = _often(phase.share("left"), own["left"] >= 0, add, carry.rest)
            carry = carry._replace(rest=rest)
        if phase.backward:
            carry = self._backward(received, last_g, carry, own)
        if phase.forward and phase.backward:
            x, g = lax.optimization_barrier((carry.x, carry.g))
            carry = carry._replace(x=x, g=g)
        return carry, None

    def _word_that_left(self, microbatch: jax.Array) -> jax.Array:
        """Where the embedding of a microbatch is differentiated: its words, summed over stages."""
        if self.computation.embeds_affinely:
            return self.zero_word
        return lax.psum(self.computation.lookup(self.rest, self._side(microbatch)), AXIS)

    def _words(self, phase: Phase, at_embedding: Any, left: Any, own: dict[str, jax.Array]) -> Any:
        """Summed over the stages: gradient of the words that left, words of those that enter."""

        def total() -> Any:
            words = []
            if at_embedding is not None:
                words.append(self._word_gradient(at_embedding, own["left"], left))
            if phase.forward:
                words.append(self.computation.lookup(self.rest, self._side(own["enters"])))
            return lax.psum(words, AXIS)

        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(total))
        needed = (own["left"] >= 0) | (own["enters"] >= 0)
        return _often(phase.share("left", "enters"), needed, total, none)

    def _word_gradient(
        self, at_embedding: jax.Array, microbatch: jax.Array, word: jax.Array
    ) -> jax.Array:
        """Gradient of the summed words of a microbatch, on the first stage."""
        side = self._side(microbatch)
        _, of_word = jax.vjp(lambda x: self.computation.embed(self.rest, side, x), word)
        (word_g,) = of_word(at_embedding)
        return word_g

    def _add_embedding_gradient(
        self,
        at_embedding: jax.Array,
        word: jax.Array,
        word_g: jax.Array,
        microbatch: jax.Array,
        total: Any,
    ) -> Any:
        side = self._side(microbatch)

        def both(rest: Any) -> Any:
            embed, lookup = self.computation.embed, self.computation.lookup
            return embed(rest, side, word), lookup(rest, side)

        function, trained, summed = self._with_sums(both, total, "embedding")
        (g_rest,) = jax.vjp(function, trained)[1]((at_embedding, word_g))
        return self._accumulate(total, g_rest, self.rest_layouts, summed)

    def _last_embedding_gradient(self, carry: Carry) -> Carry:
        """That of the microbatch that leaves in the last tick, after it."""
        [microbatch] = {
            row.backward.microbatch for row in self.schedule.ticks[-1] if row.backward is not None
        }
        at_embedding = jnp.where(self.stage == 0, carry.g, 0)
        number = jnp.int32(microbatch)
        left = self._word_that_left(number)
        word_g = lax.psum(self._word_gradient(at_embedding, number, left), AXIS)
        rest = self._add_embedding_gradient(at_embedding, left, word_g, number, carry.rest)
        return carry._replace(rest=rest)

    @jax.named_scope("pipeline_send")
    def _send(self, x: jax.Array, step: int) -> jax.Array:
        """Hand ``x`` to the next stage (step 1) or the previous one (step -1)."""
        p = self.schedule.stages
        pairs = [(i, (i + step) % p) for i in range(p)]
        if self.schedule.chunks == 1:  # nothing goes around
            pairs = [(i, j) for i, j in pairs if j == i + step]
        return lax.ppermute(x, AXIS, pairs)

    def _linearise(
        self, k: int, x: jax.Array, side: Any, first: jax.Array, earlier: Any = None
    ) -> Any:
        """Forward pass of a stretch: ``(output, report, residuals)``."""

        def function(part: Any, x: jax.Array) -> Any:
            weights = with_trainable(self.weights[k], part)
            out = self.computation.layers(weights, side, x, first, earlier)
            return (out.x, jnp.asarray(out.piece, jnp.float32)), out.report

        part = trainable(self.weights[k])
        if not self.training:
            (y, _), report = function(part, x)
            return y, report, []
        known = jax.tree.leaves((self.weights[k], side))
        (y, _), report, kept = self.stretches[k].forward(function, (part, x), known)
        return y, report, kept

    def _choose(self, stretch: jax.Array, run: Callable[[int], Any]) -> Any:
        """``run(k)`` for this stage's stretch, in a branch of its own where stages differ."""
        if not self.branches:
            return run(0)
        return lax.switch(stretch, [functools.partial(run, k) for k in range(len(self.weights))])

    def _forward(
        self, carry: Carry, own: dict[str, jax.Array]
    ) -> tuple[jax.Array, list[jax.Array], Carry]:
        """Output of a unit, its residuals by entry of the ring, and ``carry`` with its reports."""
        side = self._side(own["f_microbatch"])

        def run(k: int) -> Any:
            start, count = self.programs.stretches[k]
            if count == 0:
                return carry.x, self.ring.slot([], []), carry.layer_report
            earlier = None
            if self.computation.looks_back:  # a stage takes microbatches in their order
                earlier = self._cut(carry.layer_report, start, count)
            y, report, kept = self._linearise(k, carry.x, side, own["f_first"], earlier)
            kept = self.ring.slot(self.stretches[k].entries, kept)
            report = _where(own["f_works"], report)
            total = jax.tree.map(functools.partial(_add_at, start), carry.layer_report, report)
            return y, kept, total

        y, kept, layer_report = self._choose(own["f_stretch"], run)
        return y, kept, carry._replace(layer_report=layer_report)

    def _head(
        self,
        phase: Phase,
        y: jax.Array,
        kept: list[jax.Array],
        also: Callable[[Any], Any] | None,
        carry: Carry,
        own: dict[str, jax.Array],
    ) -> tuple[Carry, Any]:
        """Loss of the microbatch that leaves the last stage as ``y``, on all stages together.

        Nothing can be computed while ``y`` travels to all stages, and its gradient to the last one.
        So the residuals are written then, about half of them each time. What is ``also`` added to
        the gradients follows them in the same branch, if there is one.

        Returns ``(carry, gradient of y)``; the gradient is None where no backward can need it.
        """

        def objective(rest: Any, x: jax.Array) -> Any:
            return self.computation.head(rest, self._side(own["head"]), x)

        share = phase.share("head")
        always = share == 1
        half = self.ring.half() if always else len(kept)
        ring = write(carry.ring, range(half), kept[:half], own["f_slot"])
        later = kept[half:]
        if share == 0:
            return carry._replace(ring=ring), None
        x = lax.psum(jnp.where(own["f_ends"], y, 0), AXIS)
        x, ring, later = lax.optimization_barrier((x, ring, later))

        def evaluate() -> Any:
            if not self.training:
                report = objective(self.rest, x)[1]
                return jax.tree.map(jnp.add, carry.head_report, report), (), None
            function, trained, summed = self._with_sums(objective, carry.rest, "output")
            value, vjp, report = jax.vjp(function, trained, x, has_aux=True)
            g_rest, g_x = vjp(jnp.ones_like(value))
            rest = self._accumulate(carry.rest, g_rest, self.rest_layouts, summed)
            rest = rest if also is None else also(rest)
            g = lax.psum(g_x, AXIS)
            return jax.tree.map(jnp.add, carry.head_report, report), rest, g

        none = (carry.head_report, carry.rest, self.zero_x if self.training else None)
        head_report, rest, g = (
            evaluate() if always else lax.cond(own["head"] >= 0, evaluate, lambda: none)
        )
        ring = write(ring, range(half, half + len(later)), later, own["f_slot"])
        g, ring = lax.optimization_barrier((g, ring))
        carry = carry._replace(head_report=head_report, rest=rest, ring=ring)
        if self.waits:
            # a slot is written by the unit's forward and read by its backward, in this tick at once
            old = lax.dynamic_index_in_dim(carry.head_g, own["f_slot"], 0, keepdims=False)
            new = jnp.where(own["f_ends"], g, old)
            head_g = lax.dynamic_update_index_in_dim(carry.head_g, new, own["f_slot"], 0)
            carry = carry._replace(head_g=head_g)
        return carry, g

    def _backward(
        self,
        received: jax.Array,
        last_g: jax.Array | None,
        carry: Carry,
        own: dict[str, jax.Array],
    ) -> Carry:
        """Gradients of a unit."""
        g = received
        if self.waits:
            last_g = lax.dynamic_index_in_dim(carry.head_g, own["b_slot"], 0, keepdims=False)
        if last_g is not None:
            g = jnp.where(own["b_ends"], last_g, received)
        # without a unit, gradients of zeros: what a GEMM adds to the sum is then zeros too
        g = jnp.where(own["b_works"], g, 0)
        works = own["b_works"].astype(jnp.float32)
        side = self._side(own["b_microbatch"])

        def run(k: int) -> Any:
            start, count = self.programs.stretches[k]
            if count == 0:
                return g, carry.layers
            stretch = self.stretches[k]
            known = jax.tree.leaves((self.weights[k], side))
            kept = read(carry.ring, stretch, own["b_slot"])
            g_weights, g_x = stretch.backward((g, works), known, kept)
            old = self._cut(carry.layers, start, count)
            layouts = self._cut_layouts(start, count)
            measured = _where_measured(own["b_works"], g_weights)
            new = self._accumulate(old, measured, layouts)
            return g_x, _put(carry.layers, new, start, count)

        g_x, layers = self._choose(own["b_stretch"], run)
        return carry._replace(g=g_x, layers=layers)

    def _cut_layouts(self, start: int, count: int) -> Any:
        listed = isinstance(self.layouts, list)
        return self.layouts[start : start + count] if listed else self.layouts

    def _with_sums(
        self, function: Callable[..., Any], total: Any, part: str
    ) -> tuple[Callable[..., Any], Any, list[str]]:
        """``function`` of the parts other than layers, as one of what it is differentiated by.

        That comes next, and the names of the weights of ``part`` whose gradients are sums out of
        ``total``. Only ``part``'s, which ``function`` uses: what it does not use has gradient zero.
        """
        summed = [name for name in self.plan.summed if name.startswith(f"{part}/")]
        rest = with_sums(self.rest, total, summed)

        def of_trained(trained: Any, *arguments: Any) -> Any:
            value = function(with_trainable(rest, trained), *arguments)
            check_uses(rest)
            return value

        return of_trained, trainable(rest), summed

    def _accumulate(self, total: Any, g: Any, layouts: Any, summed: Sequence[str] = ()) -> Any:
        return accumulate(total, self.plan.after_microbatch(g, layouts), summed)


def _often(share: float, needed: jax.Array, run: Callable[[], Any], otherwise: Any) -> Any:
    """``run()`` in the ticks that need it, or in all when most of them do.

    All devices branch alike, but XLA hides nothing behind a branch.
    """
    if share > 0.5:
        return run()
    return lax.cond(needed, run, lambda: otherwise)


def _where(works: jax.Array, tree: Any) -> Any:
    """``tree``, or zeros where the stage has no unit in this tick."""
    return jax.tree.map(lambda a: jnp.where(works, a, jnp.zeros_like(a)), tree)


def _where_measured(works: jax.Array, grads: Any) -> Any:
    """Gradients with what FP8 products measured set to 0 where the stage has no unit."""
    return jax.tree.map(
        lambda g: Fp8Gradient(g.weight, _where(works, g.amax)) if is_fp8_gradient(g) else g,
        grads,
        is_leaf=is_fp8_gradient,
    )


def _put(layers: Any, new: Any, start: int, count: int) -> Any:
    """``layers`` with some of them replaced."""
    if isinstance(layers, list):
        return [*layers[:start], *new, *layers[start + count :]]
    return jax.tree.map(
        lambda a, n: n if len(n) == len(a) else lax.dynamic_update_slice_in_dim(a, n, start, 0),
        layers,
        new,
    )
