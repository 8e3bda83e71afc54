"""Applying a function to a stream of items in several processes, results in order.

The pools of the standard library can wait forever when a worker is killed at the wrong moment. Here
each worker has a pipe of its own, to which nobody else holds an end: when one side dies, the other
reads the end of the stream. A worker is sent something only while it waits for it, so no two ends
ever wait for each other.
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class WorkerDiedError(Exception):
    """A worker process ended by itself; ``item`` is what it worked on, None while it started."""

    def __init__(self, item: Any) -> None:
        super().__init__("a worker process died")
        self.item = item


def process_map(
    function: Callable[[T], R], items: Iterable[T], workers: int
) -> Iterator[tuple[T, R]]:
    """Yield ``(item, function(item))`` in the order of the items.

    Processes are started as items need them and are gone when the iterator ends or is closed. At
    most ``3 * workers`` items are read ahead of the one handed out last. An exception inside
    ``function`` ends its worker, which prints the traceback.

    Args:
        function: is pickled and sent to every worker once.
        items: read in this process.
        workers: largest number of processes.

    Raises:
        WorkerDiedError: a worker was killed, or ended with an exception.
    """
    pool = _Pool[T, R](function)
    stream = enumerate(items)
    waiting: deque[tuple[int, T]] = deque()
    done: dict[int, tuple[T, R]] = {}
    read = handed_out = 0
    more = True
    try:
        while True:
            while more and len(waiting) + len(pool.busy) < workers:
                if read - handed_out >= 3 * workers:
                    break
                numbered = next(stream, None)
                if numbered is None:
                    more = False
                else:
                    waiting.append(numbered)
                    read += 1
            while waiting and pool.idle:
                pool.give(waiting.popleft())
            while len(pool.starting) < len(waiting) and len(pool.processes) < workers:
                pool.start()
            while handed_out in done:
                yield done.pop(handed_out)
                handed_out += 1
            if pool.busy or waiting:
                done |= pool.collect()
            elif not more:
                return
    finally:
        pool.kill()


class _Pool(Generic[T, R]):
    """Worker processes by their connection, each starting, idle or busy with a numbered item."""

    def __init__(self, function: Callable[[T], R]) -> None:
        self.function = function
        # "spawn": a fork of a process with threads (JAX's, the tokenizer's) can deadlock.
        self.context = multiprocessing.get_context("spawn")
        self.processes: dict[Connection, BaseProcess] = {}
        self.starting: set[Connection] = set()
        self.idle: list[Connection] = []
        self.busy: dict[Connection, tuple[int, T]] = {}

    def start(self) -> None:
        ours, theirs = self.context.Pipe()
        # The function goes through the pipe: a start with much data would block if the process
        # died before reading it.
        process = self.context.Process(target=_work, args=(theirs,), daemon=True)
        try:
            process.start()
        except OSError as error:
            raise WorkerDiedError(None) from error
        finally:
            theirs.close()
        self.processes[ours] = process
        self.starting.add(ours)

    def give(self, numbered: tuple[int, T]) -> None:
        connection = self.idle.pop()
        self.busy[connection] = numbered
        self._send(connection, numbered[1])

    def collect(self) -> dict[int, tuple[T, R]]:
        """Wait for workers to get ready or finish; the finished items with their results."""
        results = {}
        for ready in wait([*self.busy, *self.starting]):
            assert isinstance(ready, Connection)
            result = self._receive(ready)
            if ready in self.starting:
                self.starting.remove(ready)
                self._send(ready, self.function)
            else:
                number, item = self.busy.pop(ready)
                results[number] = item, result
            self.idle.append(ready)
        return results

    def _send(self, connection: Connection, value: Any) -> None:
        try:
            connection.send(value)
        except OSError as error:
            raise WorkerDiedError(self._item(connection)) from error

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerDiedError(self._item(connection)) from error

    def _item(self, connection: Connection) -> T | None:
        return self.busy[connection][1] if connection in self.busy else None

    def kill(self) -> None:
        for connection, process in self.processes.items():
            connection.close()
            process.kill()
            process.join()


def _work(connection: Connection) -> None:
    """A worker: say that it is ready, receive the function, then answer item by item."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        connection.send(None)
        function = connection.recv()
        while True:
            item = connection.recv()
            connection.send(function(item))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has gone
