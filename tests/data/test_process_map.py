"""Ordered results from several processes, and no waiting for ever whoever dies."""

import math
import multiprocessing
import operator
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtron.data.process_map import WorkerDiedError, process_map


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_the_items(workers):
    results = list(process_map(math.factorial, range(30), workers))
    assert results == [(n, math.prod(range(1, n + 1))) for n in range(30)]


def test_no_item_needs_no_process():
    assert list(process_map(operator.neg, [], 4)) == []
    assert multiprocessing.active_children() == []


def test_large_items_and_results_pass(tmp_path):
    items = [bytes([n]) * 3_000_000 for n in range(6)]
    assert [result for _, result in process_map(bytes.swapcase, items, 2)] == items


def test_slow_consumer_bounds_how_far_items_are_read_ahead():
    read = []

    def items():
        for n in range(1000):
            read.append(n)
            yield n

    stream = process_map(operator.neg, items(), 2)
    for _ in range(5):
        next(stream)
        time.sleep(0.05)
    assert len(read) <= 5 + 3 * 2
    stream.close()
    assert multiprocessing.active_children() == []


def test_worker_that_exits_is_an_error_naming_its_item():
    with pytest.raises(WorkerDiedError) as died:
        list(process_map(os._exit, [7], 2))
    assert died.value.item == 7
    assert multiprocessing.active_children() == []


def test_exception_in_the_function_is_an_error_with_its_traceback_printed(capfd):
    with pytest.raises(WorkerDiedError):
        list(process_map(int, ["1", "two", "3"], 2))
    assert "invalid literal for int() with base 10: 'two'" in capfd.readouterr().err


def test_error_while_reading_items_ends_the_workers():
    def items():
        yield from range(5)
        raise KeyError("broken input")

    with pytest.raises(KeyError, match="broken input"):
        list(process_map(operator.neg, items(), 2))
    assert multiprocessing.active_children() == []


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "import itertools, multiprocessing, operator\n"
        "from jaxtron.data.process_map import process_map\n"
        "if __name__ == '__main__':\n"
        "    stream = process_map(operator.neg, itertools.count(), 2)\n"
        "    for _ in stream:\n"
        "        children = multiprocessing.active_children()\n"
        "        if len(children) == 2:\n"
        "            print(*(child.pid for child in children), flush=True)\n"
        "            break\n"
        "    input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait(10)
    assert len(pids) == 2
    deadline = time.monotonic() + 15
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"workers {pids} outlive their parent"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
