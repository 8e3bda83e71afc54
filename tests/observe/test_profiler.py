"""Traces of chosen steps."""

import jax.numpy as jnp
import pytest

from jaxtron.observe.config import ObserveConfig
from jaxtron.observe.profiler import StepProfiler


@pytest.fixture
def calls(monkeypatch):
    found = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: found.append(("start", folder)))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: found.append(("stop",)))
    monkeypatch.setattr("jax.block_until_ready", lambda tree: found.append(("wait", tree)))
    return found


def drive(profiler, steps, calls):
    for step in steps:
        profiler.before_step(step, f"state {step}")
        calls.append(step)
        profiler.after_step(step, f"metrics {step}")
    profiler.close()


def config(first, last):
    return ObserveConfig(dir="run", profile_steps=(first, last))


def test_the_trace_holds_the_chosen_steps_and_no_others(calls):
    drive(StepProfiler(config(2, 3), primary=True), range(1, 6), calls)
    assert calls == [
        1,
        ("wait", "state 2"),
        ("start", "run/profile"),
        2,
        3,
        ("wait", "metrics 3"),
        ("stop",),
        4,
        5,
    ]


def test_a_run_resumed_inside_the_range_traces_the_rest(calls):
    drive(StepProfiler(config(2, 6), primary=True), [5, 6, 7], calls)
    assert calls == [
        ("wait", "state 5"),
        ("start", "run/profile"),
        5,
        6,
        ("wait", "metrics 6"),
        ("stop",),
        7,
    ]


def test_a_run_that_ends_inside_the_range_completes_its_trace(calls):
    drive(StepProfiler(config(2, 9), primary=True), [1, 2], calls)
    assert calls[-1] == ("stop",)


@pytest.mark.parametrize(
    ("settings", "primary"), [(config(1, 2), False), (ObserveConfig(dir="run"), True)]
)
def test_other_processes_and_other_runs_trace_nothing(calls, settings, primary):
    drive(StepProfiler(settings, primary=primary), [1, 2], calls)
    assert calls == [1, 2]


def test_a_real_trace_is_written(tmp_path):
    profiler = StepProfiler(ObserveConfig(dir=str(tmp_path), profile_steps=(1, 1)), primary=True)
    profiler.before_step(1, jnp.ones(3))
    folder = profiler.after_step(1, jnp.ones(3) * 2)
    assert folder == tmp_path / "profile"
    assert list(folder.rglob("*.xplane.pb"))
