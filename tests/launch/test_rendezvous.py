"""The roll call, with threads in place of processes."""

import socket
import threading
import time

import pytest

from jaxtron.errors import LaunchError
from jaxtron.launch.rendezvous import format_ids, roll_call
from tests.launch.two_processes import free_port


def call(results, port, process_id, num_processes, timeout_s, delay_s=0.0):
    """A thread that calls in and leaves None or the error under its number."""

    def run():
        time.sleep(delay_s)
        try:
            roll_call(
                "localhost",
                port,
                num_processes=num_processes,
                process_id=process_id,
                timeout_s=timeout_s,
            )
            results.append((process_id, None))
        except LaunchError as error:
            results.append((process_id, str(error)))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def gather(port, calls):
    results = []
    for thread in [call(results, port, *arguments) for arguments in calls]:
        thread.join(20)
        assert not thread.is_alive()
    return sorted(results, key=str)


def test_all_go_on_once_all_are_there_whatever_the_order():
    port = free_port()
    begin = time.monotonic()
    # Process 0 comes late, so the others must call again.
    results = gather(port, [(0, 3, 10, 0.4), (1, 3, 10), (2, 3, 10, 0.8)])
    assert results == [(0, None), (1, None), (2, None)]
    assert 0.7 < time.monotonic() - begin < 8


def test_port_is_free_for_the_coordination_service_afterwards():
    port = free_port()
    assert gather(port, [(0, 2, 10), (1, 2, 10)]) == [(0, None), (1, None)]
    with socket.create_server(("", port)):
        pass


def test_at_the_time_limit_every_process_names_those_missing():
    port = free_port()
    results = gather(port, [(0, 6, 1.5), (2, 6, 3)])
    for _, message in results:
        assert f"localhost:{port}" in message
        assert "missing process ids 1, 3-5" in message


def test_without_process_0_the_others_say_so():
    port = free_port()
    [(_, message)] = gather(port, [(1, 2, 0.5)])
    assert "missing process ids 0" in message
    assert f"localhost:{port} within 0.5 s" in message
    assert "Connection refused" in message


def test_a_second_process_of_the_same_number_is_refused():
    # the others wait longer, so that process 1 is still there when process 0 gives up
    results = gather(free_port(), [(0, 3, 3), (1, 3, 10), (1, 3, 10, 0.5)])
    assert "missing process ids 2; process 1 on" in results[0][1]
    refused = [message for _, message in results if "refused process 1" in message]
    assert len(refused) == 1 and "number 1 is taken" in refused[0]


def test_a_process_of_another_job_size_is_refused_and_the_rest_go_on():
    results = gather(free_port(), [(0, 2, 5), (1, 4, 5), (1, 2, 5, 0.5)])
    messages = [message for _, message in results]
    assert messages.count(None) == 2
    assert "told of 4 processes, process 0 of 2" in next(m for m in messages if m)


def test_strangers_and_dead_callers_do_not_count():
    port, results = free_port(), []
    host = call(results, port, 0, 3, 10)
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"jaxtron 3 1 host-that-dies\n"):
        with connect(port) as stranger:
            stranger.sendall(greeting)
            time.sleep(0.1)
    second = call(results, port, 2, 3, 10)
    time.sleep(0.5)
    assert host.is_alive() and second.is_alive()  # process 1 is gone, so nobody may go on
    for thread in (call(results, port, 1, 3, 10), second, host):
        thread.join(15)
    assert sorted(results) == [(0, None), (1, None), (2, None)]


def connect(port):
    for _ in range(100):
        try:
            return socket.create_connection(("localhost", port), timeout=1)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError("process 0 does not listen")


def test_a_taken_port_is_reported_with_its_number():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        [(_, message)] = gather(port, [(0, 2, 1)])
    assert f"cannot listen on port {port}" in message
    assert "runtime.coordinator_address" in message


@pytest.mark.parametrize(
    "ids, text", [([1], "1"), ([3, 1, 2], "1-3"), ([1, 3, 4, 5, 9], "1, 3-5, 9")]
)
def test_process_ids_are_shown_as_ranges(ids, text):
    assert format_ids(ids) == text


def test_a_long_list_of_process_ids_is_cut():
    assert format_ids(list(range(0, 100, 2)), most=3) == "0, 2, 4 and 47 more ranges"
