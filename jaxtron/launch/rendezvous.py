"""Roll call of a job's processes before the JAX coordination service starts.

When a process stays away, ``jax.distributed.initialize`` aborts the interpreter without saying who
is missing. So process 0 first counts the others over plain TCP at the coordinator's port, tells
them every second whom it still waits for, and gives the port free once all are there. Lines: the
others say ``jaxtron NUM_PROCESSES PROCESS_ID HOST``; process 0 answers ``missing IDS``, ``go``,
``refused REASON`` or ``expired IDS``.
"""

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxtron.errors import LaunchError

_GREETING = "jaxtron"
_LONGEST_LINE = 65536
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


def roll_call(
    host: str, port: int, *, num_processes: int, process_id: int, timeout_s: float
) -> None:
    """Return once every process of the job has called in, the same moment in all of them.

    Args:
        host: the coordinator's name or address.
        port: the coordinator's port; free again afterwards.
        num_processes: processes of the job.
        process_id: this one; 0 does the counting.
        timeout_s: longest wait [seconds].

    Raises:
        LaunchError: time is up (names host, port and the missing processes), the port is taken on
            process 0, or process 0 refused this one.
    """
    deadline = time.monotonic() + timeout_s
    where = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
    if process_id == 0:
        _Desk(where, num_processes, timeout_s, deadline).run(port)
    else:
        _call_in(host, port, where, num_processes, process_id, timeout_s, deadline)


def format_ids(ids: list[int], most: int = 20) -> str:
    """Numbers as ``1, 4-7``; at most ``most`` entries."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:most]]
    return ", ".join(shown) + (f" and {len(runs) - most} more ranges" if len(runs) > most else "")


@dataclass(eq=False)
class _Caller:
    """A connection to process 0."""

    connection: socket.socket
    peer: str
    received: bytes = b""
    process_id: int | None = None


@dataclass
class _Desk:
    """Process 0's side: takes names until all are there."""

    where: str
    num_processes: int
    timeout_s: float
    deadline: float
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    callers: list[_Caller] = field(default_factory=list)
    arrived: dict[int, _Caller] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def run(self, port: int) -> None:
        try:
            server = _listen(port)
        except OSError as error:
            raise LaunchError(
                f"process 0 cannot listen on port {port} for the coordinator {self.where}: "
                f"{error.strerror or error}; set runtime.coordinator_address to host:port with "
                "a free port, the same in all processes"
            ) from error
        missing: list[int] = []
        try:
            self.selector.register(server, selectors.EVENT_READ)
            self._wait(server)
            missing = self._missing()
            # Before the answer: whoever is told to go must not reach this listener again.
            server.close()
            self._tell("go" if not missing else f"expired {format_ids(missing)}")
        finally:
            server.close()
            self.selector.close()
            for caller in self.callers:
                caller.connection.close()
        if missing:
            raise _expired(self.where, self.timeout_s, self.num_processes, missing, self.refused)

    def _wait(self, server: socket.socket) -> None:
        next_report = 0.0
        while self._missing() and (now := time.monotonic()) < self.deadline:
            if now >= next_report:
                self._tell(f"missing {format_ids(self._missing())}")
                next_report = now + 1.0
            pause = max(0.0, min(self.deadline, next_report) - now)
            for selected, _ in self.selector.select(pause):
                if selected.fileobj is server:
                    self._accept(server)
                else:
                    self._read(selected.data)

    def _missing(self) -> list[int]:
        return [i for i in range(1, self.num_processes) if i not in self.arrived]

    def _tell(self, line: str) -> None:
        for caller in list(self.arrived.values()):
            _send(caller.connection, line)

    def _accept(self, server: socket.socket) -> None:
        connection, address = server.accept()
        connection.settimeout(5.0)
        caller = _Caller(connection, str(address[0]))
        self.callers.append(caller)
        self.selector.register(connection, selectors.EVENT_READ, caller)

    def _read(self, caller: _Caller) -> None:
        try:
            data = caller.connection.recv(4096)
        except OSError:
            data = b""
        caller.received += data
        if not data or len(caller.received) > _LONGEST_LINE:
            # The caller died, or was no process of ours; its number is free for another try.
            self._drop(caller)
        elif caller.process_id is None and b"\n" in caller.received:
            self._admit(caller, caller.received.split(b"\n")[0].decode(errors="replace").split())

    def _admit(self, caller: _Caller, words: list[str]) -> None:
        """Write a caller into the list, or refuse it."""
        if len(words) != 4 or words[0] != _GREETING or not (words[1] + words[2]).isdecimal():
            self._drop(caller)
            return
        num_processes, process_id, host = int(words[1]), int(words[2]), words[3]
        reason = None
        if num_processes != self.num_processes:
            reason = f"it was told of {num_processes} processes, process 0 of {self.num_processes}"
        elif not 0 < process_id < num_processes or process_id in self.arrived:
            others = self.arrived.get(process_id)
            reason = f"number {process_id} is taken" + (f" by {others.peer}" if others else "")
        if reason is None:
            caller.process_id, caller.peer = process_id, host
            self.arrived[process_id] = caller
        else:
            self.refused.append(f"process {process_id} on {host}: {reason}")
            _send(caller.connection, f"refused {reason}")
            self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        self.selector.unregister(caller.connection)
        self.callers.remove(caller)
        caller.connection.close()
        if caller.process_id is not None:
            del self.arrived[caller.process_id]


def _call_in(
    host: str,
    port: int,
    where: str,
    num_processes: int,
    process_id: int,
    timeout_s: float,
    deadline: float,
) -> None:
    """The other processes' side: call until process 0 answers, then wait for its word."""
    greeting = f"{_GREETING} {num_processes} {process_id} {socket.gethostname()}"
    pause, missing, obstacle = _FIRST_PAUSE_S, "0", ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                _send(connection, greeting)
                for verb, rest in _lines(connection, deadline):
                    if verb == "go":
                        return
                    if verb == "refused":
                        raise LaunchError(
                            f"the coordinator {where} refused process {process_id}: {rest}; every "
                            "process of the job needs its own number and the same num_processes"
                        )
                    if verb == "expired":
                        raise _expired(where, timeout_s, num_processes, rest)
                    if verb == "missing":
                        missing = rest
            obstacle = "process 0 closed the connection"
            missing = "0"
        except TimeoutError:
            obstacle = "no answer"
        except OSError as error:
            obstacle = error.strerror or str(error)
            missing = "0"
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    notes = [f"no connection to process 0: {obstacle}"] if missing == "0" else []
    raise _expired(where, timeout_s, num_processes, missing, notes)


def _lines(connection: socket.socket, deadline: float) -> Iterator[tuple[str, str]]:
    """Process 0's lines as (verb, rest), until it hangs up or time is up (TimeoutError)."""
    received = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        data = connection.recv(4096)
        if not data:
            return
        *complete, received = (received + data).split(b"\n")
        for line in complete:
            verb, _, rest = line.decode(errors="replace").partition(" ")
            yield verb, rest


def _listen(port: int) -> socket.socket:
    """A listener on all addresses, IPv4 and IPv6 where the machine has both."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=1024)


def _send(connection: socket.socket, line: str) -> None:
    """Send a line; a caller that is gone shows up when its connection is read."""
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())


def _expired(
    where: str,
    timeout_s: float,
    num_processes: int,
    missing: list[int] | str,
    notes: list[str] | None = None,
) -> LaunchError:
    ids = missing if isinstance(missing, str) else format_ids(missing)
    detail = "".join(f"; {note}" for note in notes or ())
    return LaunchError(
        f"the {num_processes} processes of the job did not all meet at {where} within "
        f"{timeout_s:g} s: missing process ids {ids}{detail}. Look at their logs, see that they "
        f"can reach {where}, or raise runtime.initialization_timeout_s"
    )
