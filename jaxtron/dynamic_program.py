"""Training with dynamic context parallelism: the executables, and a step made of their calls."""

import functools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtron.parallel.context.dynamic import CALL, DynamicContext, ScheduledStep
from jaxtron.parallel.context.schedule import MenuEntry
from jaxtron.parallel.state_sharding import with_shardings
from jaxtron.program import Program
from jaxtron.room import program_bytes
from jaxtron.state_plan import State
from jaxtron.update import apply_gradients

log = logging.getLogger(__name__)

_ARRAYS = ("tokens", "labels", "loss_mask", "position_ids", "segment_ids", "document_length")


@dataclass(frozen=True)
class PlacedCall:
    """A :class:`jaxtron.parallel.context.dynamic.ScheduledCall` on the devices.

    Attributes:
        entry: the executable.
        batch: its microbatches.
        share: which part of the step they are; see ``Program.add_gradients``.
    """

    entry: MenuEntry
    batch: dict[str, jax.Array]
    share: dict[str, np.int32]


class DynamicProgram:
    """Runs a step's microbatches of several context degrees over one mesh and one state.

    Executables: one for each entry of the menu, which adds to a step's loss and gradients; one that
    makes the zeros to which they are added; and one for the optimizer. All are compiled ahead, so
    nothing is compiled after the first step.

    Args:
        program: the model, its mesh and state; it also evaluates.
        stage: cuts global batches.
    """

    def __init__(self, program: Program, stage: DynamicContext) -> None:
        self.program = program
        self.stage = stage
        self._parts = {
            entry: program.with_rows(entry.degree, entry.length, CALL) for entry in stage.menu
        }
        self._compiled: dict[Any, Any] = {}

    def place(self, step: ScheduledStep) -> Sequence[PlacedCall]:
        """Put this process's rows of a scheduled step on its devices."""
        placed = []
        for call in step.calls:
            part = self._parts[call.entry]
            rows = part.placement.rows
            share = {
                "trained": step.trained,
                "live": step.live,
                "first_row": call.first_row,
                "count": call.count,
            }
            placed.append(
                PlacedCall(
                    call.entry,
                    part.place({name: array[rows] for name, array in call.arrays.items()}),
                    {name: np.int32(value) for name, value in share.items()},
                )
            )
        return placed

    def step_bytes(self, state: State, step: Sequence[PlacedCall]) -> int:
        """Compile all executables; bytes that a step allocates on a device besides arguments."""
        self.compile()
        needed = {name: program_bytes(compiled) for name, compiled in self._compiled.items()}
        return needed.pop("begin") + max(needed.values())

    def train_step(self, state: State, step: Sequence[PlacedCall]) -> tuple[State, Any]:
        """One optimizer step; ``state`` may not be used afterwards."""
        total = self.gradients(state, step)
        new_state, metrics = self._compiled["update"](state, total)
        return new_state, metrics

    def gradients(self, state: State, step: Sequence[PlacedCall]) -> Any:
        """Loss, tokens, gradients and reports of a step.

        Read by :func:`jaxtron.update.apply_gradients`.
        """
        self.compile()
        total = self._compiled["begin"]()
        for call in step:
            total = self._compiled[call.entry](state, total, call.batch, call.share)
        return total

    def compile(self) -> None:
        """Compile every executable, once."""
        if self._compiled:
            return
        began = time.perf_counter()
        program = self.program
        state = program.placed_state()
        share = {
            name: jax.ShapeDtypeStruct((), jnp.int32)
            for name in ("trained", "live", "first_row", "count")
        }
        batches = {entry: self._abstract_batch(entry) for entry in self._parts}
        some = next(iter(self._parts))
        shapes = jax.eval_shape(
            self._parts[some]._with_report,
            state["params"],
            batches[some],
            0,
            1.0,
            share,
            jax.eval_shape(program.fp8_scales, state),
        )
        shardings = self._total_shardings(shapes)
        total = with_shardings(shapes, shardings)

        def zeros() -> Any:
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        lowered: dict[Any, Any] = {"begin": jax.jit(zeros, out_shardings=shardings).lower()}
        for entry, part in self._parts.items():
            add = jax.jit(part.add_gradients, donate_argnums=1, out_shardings=shardings)
            lowered[entry] = add.lower(state, total, batches[entry], share)
        update = jax.jit(
            functools.partial(apply_gradients, program),
            donate_argnums=0,
            out_shardings=(program.state_shardings, program.replicated),
        )
        lowered["update"] = update.lower(state, total)
        # Processes of a job compile in one order, as they exchange what they find on the way.
        workers = len(lowered) if jax.process_count() == 1 else 1
        with ThreadPoolExecutor(workers) as pool:
            compiled = pool.map(lambda each: each.compile(), lowered.values())
            self._compiled = dict(zip(lowered, compiled, strict=True))
        menu = ", ".join(f"{e.degree} x {e.length // e.degree}" for e in self._parts)
        log.info(
            "dynamic context: %d executables compiled in %.1f s; devices of a row x their tokens: "
            "%s",
            len(self._compiled),
            time.perf_counter() - began,
            menu,
        )

    def _abstract_batch(self, entry: MenuEntry) -> dict[str, jax.ShapeDtypeStruct]:
        placement = self._parts[entry].placement
        width = self.stage.context // entry.degree * entry.length
        shape = (CALL, placement.rows_per_microbatch, width)
        return {
            name: jax.ShapeDtypeStruct(
                shape,
                jnp.float32 if name == "loss_mask" else jnp.int32,
                sharding=placement.sharding,
            )
            for name in _ARRAYS
        }

    def _total_shardings(self, shapes: Any) -> Any:
        """Shardings of what ``Program.add_gradients`` returns; gradients are the third."""
        program = self.program
        loss, tokens, _, *reports = jax.tree.map(lambda _: program.replicated, shapes)
        return loss, tokens, program.state_shardings["params"], *reports
