"""What does not fit into the devices' memory is refused before it runs."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxtron import room
from jaxtron.config.load import load_config
from jaxtron.errors import ConfigError
from jaxtron.program import Program
from jaxtron.trainer import Trainer

TINY = [
    "data.source=synthetic",
    "model.num_layers=1",
    "train.global_batch_size=8",
    "parallel.fsdp=2",
]


def config(folder, *overrides):
    return load_config("tiny", [*TINY, f"observe.dir={folder}", *overrides])


def devices(*figures):
    return [SimpleNamespace(memory_stats=lambda f=f: f) for f in figures]


def test_the_fullest_device_counts():
    full = {"bytes_limit": 100, "bytes_in_use": 90}
    assert room.free_bytes(devices({"bytes_limit": 100, "bytes_in_use": 20}, full)) == 10
    assert room.free_bytes(devices({}, None)) is None


def test_bytes_of_a_program_and_of_a_state(tmp_path):
    argument = jax.ShapeDtypeStruct((1024,), np.float32)
    in_place = jax.jit(lambda a: a * 2, donate_argnums=0).lower(argument).compile()
    assert room.program_bytes(in_place) < 64
    new = jax.jit(lambda a: a * 2).lower(argument).compile()
    assert 4096 <= room.program_bytes(new) < 4096 + 64
    program = Program(config(tmp_path), jax.devices()[:2])
    state = program.init_state()
    shards = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)]
    assert room.array_bytes(state) == sum(shards)


def with_room(monkeypatch, *left):
    """Devices that have this many bytes left, at one time after the other."""
    figures = list(left)
    monkeypatch.setattr(
        room, "free_bytes", lambda _: figures.pop(0) if len(figures) > 1 else figures[0]
    )


def test_a_state_without_room_is_refused_before_it_is_made(tmp_path, monkeypatch):
    trainer = Trainer(config(tmp_path), jax.devices()[:2])
    monkeypatch.setattr(trainer.program, "init_state", lambda: pytest.fail("state was made"))
    with_room(monkeypatch, 1000)
    with pytest.raises(ConfigError, match=r"state .* needs 0\.0 GiB .*optimizer\.offload"):
        trainer.fit()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_step_without_room_is_refused_before_it_runs(tmp_path, monkeypatch, dynamic):
    more = ["train.micro_batch_size=2"]
    if dynamic:
        more = [
            "parallel.fsdp=1",
            "parallel.context=2",
            "parallel.dynamic_context=true",
            "data.reset_attention_mask=true",
            "data.reset_position_ids=true",
            "data.eod_mask_loss=true",
            "data.eod_token=0",
        ]
    trainer = Trainer(config(tmp_path, *more), jax.devices()[:2])
    with_room(monkeypatch, 2**30, 100)
    first = r"max_seqlen_per_dp_cp_rank" if dynamic else r"train\.micro_batch_size"
    message = rf"a training step, besides its state, .*{first}.*train\.recompute"
    with pytest.raises(ConfigError, match=message):
        trainer.fit()
    assert "loss" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_step_is_compiled_once(tmp_path, monkeypatch):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    program = Program(config(tmp_path), jax.devices()[:2])
    state = program.init_state()
    rows = np.zeros((8, program.config.data.seq_length), np.int32)
    batch = program.place(
        {"tokens": rows, "labels": rows, "loss_mask": np.ones(rows.shape, np.float32)}
    )
    assert program.step_bytes(state, batch) > 0
    before = len(compiled)
    assert before > 0
    program.train_step(state, batch)
    assert len(compiled) == before
