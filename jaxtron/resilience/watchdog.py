"""End a job that stands still, and say which process holds it up.

JAX's heartbeats find processes that are gone. One that lives but does nothing (a read that never
returns, say) leaves the others waiting in a collective for ever. So each process counts what its
loop begins and tells the coordination service from a thread of its own; the loop's beginnings are
the same in every process, so the one with the lowest count is the one that all wait for.
"""

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed  # no public way to the coordination service's client

log = logging.getLogger(__name__)

STALLED_STATUS = 1
_FOLDER = "jaxtron/progress/"
_LONGEST_PERIOD_S = 10.0
_FAREWELL_S = 3.0


class Watchdog:
    """Ends this process when its loop begins nothing for too long; a context manager.

    Does nothing in a job of one process.

    Args:
        timeout_s: longest time between two beginnings [seconds]; None: no end.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._count = 0
        self._what = "starting"
        self._since: float | None = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._timeout_s is not None and jax.process_count() > 1:
            self._thread = threading.Thread(
                target=self._watch, args=(self._timeout_s,), daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, what: str) -> None:
        """Note what the loop does from now on: ``reading the batch of step 3``."""
        self._count += 1
        self._what, self._since = what, time.monotonic()

    @contextlib.contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Around work that has a time limit of its own."""
        self.begin(what)
        self._since = None
        try:
            yield
        finally:
            self._since = time.monotonic()

    def _watch(self, timeout_s: float) -> None:
        while not self._ended.wait(_period(timeout_s)):
            since = self._since
            self._publish()
            if since is not None and time.monotonic() - since > timeout_s:
                self._give_up(timeout_s)

    def _publish(self) -> None:
        entry = [self._count, self._what, socket.gethostname()]
        with contextlib.suppress(Exception):  # JAX itself ends a process whose service is gone
            _client().key_value_set(
                f"{_FOLDER}{jax.process_index()}", json.dumps(entry), allow_overwrite=True
            )

    def _give_up(self, timeout_s: float) -> None:
        me = jax.process_index()
        try:
            found = _client().key_value_dir_get(_FOLDER)
            entries = {int(name.rpartition("/")[2]): json.loads(text) for name, text in found}
        except Exception as error:
            entries = {}
            log.warning("the other processes' progress cannot be read: %s", error)
        for process in set(range(jax.process_count())) - entries.keys():
            entries[process] = [-1, "of which nothing was heard", "an unknown host"]
        entries[me] = [self._count, self._what, socket.gethostname()]
        print(f"error: {report(entries, me, timeout_s)}", file=sys.stderr, flush=True)
        time.sleep(farewell(entries, me, timeout_s))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(STALLED_STATUS)  # the main thread waits for something that does not come


def farewell(entries: dict[int, list[Any]], me: int, timeout_s: float) -> float:
    """Seconds that a process which gives up stays, so that the others can still say why.

    Process 0 has the coordination service, which they ask. And where one is gone that they wait
    for, their collective fails at once: it leaves them time to come to their own end first.

    Args:
        entries: process id -> its count, what it does, its host.
        me: id of the process.
        timeout_s: ``runtime.stall_timeout_s``.
    """
    counts = {process: count for process, (count, _, _) in entries.items()}
    waited_for = counts[me] < max(counts.values())
    if waited_for:
        return _period(timeout_s) + _FAREWELL_S
    return _FAREWELL_S if me == 0 else 0.0


def _period(timeout_s: float) -> float:
    """Seconds between two looks."""
    return min(_LONGEST_PERIOD_S, timeout_s / 4)


def report(entries: dict[int, list[Any]], me: int, timeout_s: float) -> str:
    """Who waits and who is waited for.

    Args:
        entries: process id -> its count, what it does, its host.
        me: id of the process that reports.
        timeout_s: how long it has done so at least.
    """
    least = min(count for count, _, _ in entries.values())
    head = (
        f"process {me} has been {entries[me][1]} for more than runtime.stall_timeout_s "
        f"({timeout_s:g} s)"
    )
    behind = {i: entry for i, entry in entries.items() if entry[0] == least}
    if len(behind) == len(entries):
        return f"{head}, and no process is behind another: see the logs of all of them"
    names = "; ".join(
        f"process {i} on {host}, {what}" for i, (_, what, host) in sorted(behind.items())
    )
    return f"{head}; the job waits for {names}. Look at its log, its storage and its devices"


def _client() -> Any:
    return distributed.global_state.client
