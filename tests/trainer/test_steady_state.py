"""No recompiles, no leaks, no doubled state (O23)."""

import gc
import weakref

import jax

from jaxtron.trainer import Trainer
from tests.trainer.runs import evaluations, make_config, make_trainer


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def test_ten_steps_compile_once_donate_and_do_not_grow(tmp_path):
    config = make_config(
        tmp_path,
        train={"steps": 11},
        eval={"interval": 5, "iters": 1},
        checkpoint={"interval": 7},
    )
    trainer = Trainer(config, jax.devices()[:1])  # not a program that another test has used
    program = trainer.program
    step, states, live = program.train_step, [], []

    def watched(state, batch):
        states.append([weakref.ref(array) for array in jax.tree.leaves(state)])
        result = step(state, batch)
        del state
        if len(states) == 10:
            trainer.checkpointer.wait()  # what was saved is alive until it is written
        live.append(live_bytes())
        return result

    watched.lower = step.lower
    program.train_step = watched
    try:
        trainer.fit()
    finally:
        program.train_step = step
    assert len(evaluations(tmp_path)) == 3
    assert step._cache_size() == 1
    assert program.eval_step._cache_size() == 1
    assert len(states) == 11
    # A CPU lends a state that is being saved to the writer without a copy, and so cannot give its
    # memory to the next step; it goes when it is written.
    for number, leaves in enumerate(states):
        arrays = [ref() for ref in leaves]
        assert all(array is None or array.is_deleted() for array in arrays), number
    # From the second step (the first has no metrics of a step before it) to the save of the
    # seventh there is one state and a few numbers of metrics, and no more when that is over.
    assert max(live[1:7]) - live[1] < 1000 and live[9] == live[1], live


def test_the_next_step_and_its_batch_do_not_wait_for_metrics(tmp_path, monkeypatch):
    config = make_config(tmp_path, train={"steps": 4}, eval={"interval": 0})
    trainer = make_trainer(config)
    program, events = trainer.program, []
    calls = {"dispatch": program.train_step, "place": program.place, "fetch": jax.device_get}

    def watched(name):
        def call(*args):
            events.append(name)
            return calls[name](*args)

        call.lower = getattr(calls[name], "lower", None)
        return call

    monkeypatch.setattr(program, "train_step", watched("dispatch"))
    monkeypatch.setattr(program, "place", watched("place"))
    monkeypatch.setattr(jax, "device_get", watched("fetch"))
    trainer.fit()
    one = ["place", "dispatch"]
    assert events[:11] == [*one, *one, "fetch", *one, "fetch", *one, "fetch"]


def test_restoring_holds_one_copy_of_the_state(tmp_path):
    sections = {"parallel": {"fsdp": 8}}
    make_trainer(make_config(tmp_path, **sections, train={"exit_interval": 1})).fit()
    trainer = make_trainer(make_config(tmp_path, **sections))
    before = live_bytes()
    state, _, _ = trainer._start()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert size <= live_bytes() - before <= 1.01 * size
