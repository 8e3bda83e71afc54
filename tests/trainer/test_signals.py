"""SIGTERM or SIGUSR1 in any phase: one checkpoint, and a resume that is bitwise (O21)."""

import os
import signal
import time

import pytest

from jaxtron.checkpoint.store import StateWriter
from jaxtron.resilience.exits import exit_status
from tests.trainer.runs import evaluations, make_config, make_trainer, saved_digests, steps, train


def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


class Acting:
    """A dataset that does something before it gives one of its rows, once."""

    def __init__(self, dataset, row, action):
        self.name = dataset.name
        self._dataset, self._row, self._action = dataset, row, action

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        if index == self._row and self._action is not None:
            action, self._action = self._action, None
            action()
        return self._dataset[index]


def stall():
    send()
    time.sleep(60)


def start(folder, **sections):
    return make_trainer(make_config(folder, **sections))


def set_data(trainer, **datasets):
    for name, dataset in datasets.items():
        object.__setattr__(trainer.datasets, name, dataset)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that no signal comes to."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return saved_digests(folder, 6)


def saved(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def assert_goes_on(folder, whole, step):
    """One checkpoint at ``step``, from which the run ends with the bits of the whole run."""
    assert saved(folder)[-1] == step
    assert [line["step"] for line in steps(folder)] == list(range(1, step + 1))
    assert train(folder).reason == "finished"
    assert saved_digests(folder, 6) == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_between_two_steps(tmp_path, whole, number, monkeypatch):
    trainer = start(tmp_path)
    step = trainer.program.train_step

    def train_step(state, batch):
        if int(state["step"]) == 2:
            send(number)
            send(number)
        return step(state, batch)

    monkeypatch.setattr(trainer.program, "train_step", train_step)
    monkeypatch.setattr(trainer.program, "step_bytes", lambda *_: 0)
    before = signal.getsignal(number)
    result = trainer.fit()
    assert (result.step, result.reason) == (3, number.name)
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    assert_goes_on(tmp_path, whole, 3)


def test_while_the_step_is_compiled(tmp_path, monkeypatch):
    trainer = start(tmp_path)
    monkeypatch.setattr(trainer.program, "step_bytes", lambda *_: send() or 0)
    result = trainer.fit()
    assert (result.step, result.reason, saved(tmp_path)) == (0, "SIGTERM", [0])


@pytest.mark.parametrize("reading", [{"num_threads": 0}, {"num_threads": 1, "prefetch": 1}])
def test_while_data_stalls(tmp_path, whole, reading):
    """The batch of step 3 never comes; the two steps before it are saved at once."""
    trainer = start(tmp_path, data=reading)
    set_data(trainer, train=Acting(trainer.datasets.train, 2 * 8, stall))
    began = time.monotonic()
    result = trainer.fit()
    assert time.monotonic() - began < 30
    assert result.reason == "SIGTERM"
    assert_goes_on(tmp_path, whole, result.step)


def test_in_an_evaluation(tmp_path, whole):
    """It is left out; the stalled read of its second batch too."""
    trainer = start(tmp_path, eval={"interval": 2, "iters": 2}, data={"num_threads": 0})
    set_data(trainer, valid=Acting(trainer.datasets.valid, 8, stall))
    began = time.monotonic()
    result = trainer.fit()
    assert time.monotonic() - began < 30
    assert (result.step, result.reason, evaluations(tmp_path)) == (2, "SIGTERM", [])
    assert_goes_on(tmp_path, whole, 2)


def test_during_an_asynchronous_save(tmp_path, whole, monkeypatch):
    """Both checkpoints are whole, whatever number of signals comes."""
    write, wait = StateWriter.write, StateWriter.wait

    def signalled(call):
        def method(*arguments):
            send()
            result = call(*arguments)
            send()
            return result

        return method

    monkeypatch.setattr(StateWriter, "write", signalled(write))
    monkeypatch.setattr(StateWriter, "wait", signalled(wait))
    trainer = start(tmp_path, checkpoint={"interval": 2, "async_save": True})
    result = trainer.fit()
    assert result.reason == "SIGTERM"
    monkeypatch.undo()
    assert result.step == 2
    assert_goes_on(tmp_path, whole, 2)


def test_status_is_that_of_a_process_ended_by_the_signal():
    assert [exit_status(r) for r in ("SIGTERM", "SIGUSR1", "finished", "exit_interval")] == [
        143,
        138,
        0,
        0,
    ]
