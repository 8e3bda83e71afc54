"""Runs any schedule: a scan over the ticks of each of its phases, inside the manual region.

All stages go through the ticks together, and a phase (forwards alone, both, backwards alone) has
nothing but its halves in it: a stage without a unit in a tick computes along with the others, whom
it would have to wait for anyway, and its results are dropped. So all devices run the same straight
code, and XLA sees which sends and sums can travel beside which computation:

- activations and gradients move on by collective-permutes;
- embedding and output layer are spread over the stages (their vocabulary is): all stages take the
  loss of the microbatch whose last layer was just computed.

A branch is left where stages differ in what they compute: with several chunks, or uneven layers,
the stretch of layers is chosen by a switch that only a stage's own devices take. What crosses
stages stands outside of it (a permute inside would wait for the other devices for ever).

What the start of a tick can know travels while its forward pass computes: the gradients of the tick
before, to the stage before and to the embedding, and the embedding of the microbatch that enters in
the next tick. Outputs travel to the next stage while the backward pass computes. Nothing can be
computed while the last stage's output travels to all stages and its gradient back: residuals are
written to the ring then. (XLA puts a collective behind whatever comes between its operands and its
first use, a branch too; optimization barriers say what that is.)

The gradient of a unit of work begins with its forward pass's residuals out of a ring buffer;
nothing is computed twice unless ``train.recompute`` asks for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxtron.parallel.computation import Computation
from jaxtron.parallel.microbatches import GradientPlan, Params
from jaxtron.parallel.pipeline.layout import Placement
from jaxtron.parallel.pipeline.schedule import Schedule, forward_schedule
from jaxtron.parallel.pipeline.step import Step
from jaxtron.precision.fp8_delayed import Scales


@dataclass(frozen=True)
class Pipelined:
    """Runs a step's microbatches by a schedule; the counterpart of ``Sequential``.

    Attributes:
        plan: gathering of weights and reduction of gradients.
        make_schedule: number of microbatches to the schedule of a training step.
        placement: layers of every stage and chunk.
    """

    plan: GradientPlan
    make_schedule: Callable[[int], Schedule]
    placement: Placement

    def value_and_gradients(
        self,
        computation: Computation,
        params: Params,
        microbatches: Any,
        scales: Scales | None = None,
    ) -> tuple[Any, Params, Scales]:
        """As :meth:`jaxtron.parallel.microbatches.Sequential.value_and_gradients`.

        Gradients, scales and the layers' reports are those of the stage's own layers.
        """
        schedule = self.make_schedule(jax.tree.leaves(microbatches)[0].shape[0])
        step = Step(
            self.plan, self.placement, schedule, computation, params, microbatches, True, scales
        )
        carry = step.run()
        grads = {**carry.rest, "layers": carry.layers}
        reports = carry.head_report, carry.layer_report
        return reports, self.plan.finish(grads), self.plan.measured(grads, scales)

    def reports(self, computation: Computation, params: Params, microbatches: Any) -> Any:
        """As :meth:`jaxtron.parallel.microbatches.Sequential.reports`."""
        count = jax.tree.leaves(microbatches)[0].shape[0]
        layers = self.placement.layers
        schedule = forward_schedule(len(layers), len(layers[0]), count)
        step = Step(
            self.plan, self.placement, schedule, computation, params, microbatches, False, None
        )
        return step.run().head_report
