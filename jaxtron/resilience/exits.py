"""What ends a launch before its last step: a signal, a time, a step; on all processes alike.

Python calls the handler of a signal in the main thread between two bytecodes, so a compilation or a
wait for the devices ends first. It only notes the signal. The loop looks at the note after each
step and before each batch of an evaluation; a wait for data is broken off.

With several processes a note of one is no reason for the others, and a process that stopped alone
would leave them waiting in a collective. So every process hands its note to a maximum over all
devices, queued behind each step, and reads the result with the metrics of that step: no wait of its
own, and the same answer everywhere. By then the next step runs, after which all of them stop.
"""

import functools
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtron.config.run import TrainConfig

T = TypeVar("T")

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_GO_ON, _TIME_IS_UP = 0, 1  # below every signal's number: of several notes the largest counts


class Stopped(Exception):
    """A signal came where what is under way can be dropped."""


def exit_status(reason: str) -> int:
    """Status of a process whose launch ended for a reason: 128 + the number of a signal, else 0."""
    return 128 + signal.Signals[reason] if reason in signal.Signals.__members__ else 0


class Exits:
    """The early end of one launch; a context manager, in which signals are noted.

    Args:
        train: exit_interval, exit_duration_min.
        mesh: of the run, over whose devices several processes agree.
        handle_signals: whether ``EXIT_SIGNALS`` are noted; otherwise they do what they did. They
            can be noted in the main thread alone.
    """

    def __init__(self, train: TrainConfig, mesh: Mesh, *, handle_signals: bool) -> None:
        self._train = train
        self._alone = jax.process_count() == 1
        self._mesh = mesh
        self._handles = handle_signals and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._arrays: dict[int, jax.Array] = {}
        self._breakable = False
        self._reset()

    def _reset(self) -> None:
        self._began = time.monotonic()
        self._noted = 0  # number of a signal that came here
        self._agreed = _GO_ON  # the largest note of all processes

    def __enter__(self) -> "Exits":
        self._reset()
        if self._handles:
            self._before = {number: signal.signal(number, self._note) for number in EXIT_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = max(self._noted, number)
        if self._breakable:
            raise Stopped

    # -- notes of all processes ----------------------------------------------------------------

    def ask(self, *, signals_only: bool = False) -> jax.Array | int:
        """What the processes have noted, on its way; ``hear`` takes it. All must call it."""
        note = self._noted
        limit = None if signals_only else self._train.exit_duration_min
        if not note and limit is not None and time.monotonic() - self._began > 60 * limit:
            note = _TIME_IS_UP
        if self._alone:
            self.hear(note)
            return note
        if note not in self._arrays:
            self._arrays[note] = self._on_devices(note)
        return self._largest(self._arrays[note])

    def hear(self, answer: jax.Array | int) -> None:
        """Wait for an answer; from then on ``reason`` knows it."""
        self._agreed = max(self._agreed, int(answer))

    @functools.cached_property
    def _largest(self) -> Any:
        return jax.jit(jnp.max, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    def _on_devices(self, note: int) -> jax.Array:
        """A global array of one number a device: ``note`` on those of this process."""
        return jax.make_array_from_callback(
            (self._mesh.size,),
            NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names)),
            lambda index: np.full(self._mesh.size, note, np.int32)[index],
        )

    # -- what the loop asks --------------------------------------------------------------------

    @property
    def _number(self) -> int:
        """The largest note that this process may act on."""
        return max(self._agreed, self._noted) if self._alone else self._agreed

    @property
    def signalled(self) -> bool:
        """Whether a signal ends the launch."""
        return self._number > _TIME_IS_UP

    def reason(self, step: int, start: int) -> str | None:
        """Why a launch that began at step ``start`` ends after ``step``; None: it goes on."""
        if self.signalled:
            return signal.Signals(self._number).name
        if step in (start, self._train.steps):
            return None
        if self._train.exit_interval is not None and step % self._train.exit_interval == 0:
            return "exit_interval"
        return "exit_duration_min" if self._number == _TIME_IS_UP else None

    def breakable(self, source: Iterator[T]) -> Iterator[T]:
        """The items of ``source``; a signal ends the wait for one.

        Not with several processes: others may be in the step that this item is for.

        Raises:
            Stopped: there was a signal.
        """
        while True:
            try:
                item = self._take(source)
            except StopIteration:
                return
            yield item

    def _take(self, source: Iterator[T]) -> T:
        if self.signalled:
            raise Stopped
        self._breakable = self._alone
        try:
            # Once more: a signal may have come before the line above.
            if self.signalled:
                raise Stopped
            return next(source)
        finally:
            self._breakable = False
