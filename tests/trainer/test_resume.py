"""A run that stops and goes on is the run that never stopped (six steps = three and three)."""

import json
import logging
import shutil

import jax
import numpy as np
import optax
import pytest

from jaxtron.errors import CheckpointError, ConfigError
from jaxtron.resume import check_architecture, check_continuation, run_meta, with_fresh_optimizer
from tests.trainer.runs import (
    BATCH,
    assert_bitwise,
    gathered,
    make_config,
    make_trainer,
    records,
    saved_digests,
    saved_state,
    steps,
    train,
)

MEASURED = ("step", "loss", "grad_norm", "lr", "tokens", "valid_tokens", "consumed_samples")


def measured(folder):
    """What a step computed, without times."""
    return [{key: record[key] for key in MEASURED} for record in steps(folder)]


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_six_steps_are_three_and_three_and_two_and_two_and_two_bit_by_bit(tmp_path, level):
    """With dropout, whose masks go on where they were."""
    whole = tmp_path / "whole"
    sections = {
        "parallel": {"fsdp": 2, "data_sharding": level},
        "model": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    }
    assert train(whole, **sections).reason == "finished"
    digests = saved_digests(whole, 6)
    assert any("/mu/" in name for name in digests) and any("/nu/" in name for name in digests)
    for interval in (3, 2):
        parts = tmp_path / f"parts of {interval}"
        for end in range(interval, 7, interval):
            result = train(parts, **sections, train={"exit_interval": interval})
            reason = "finished" if end == 6 else "exit_interval"
            assert (result.step, result.reason) == (end, reason)
        assert measured(parts) == measured(whole)
        assert [record["step"] for record in records(parts)] == [1, 2, 3, 4, 5, 6]
        assert saved_digests(parts, 6) == digests
        assert saved_digests(parts, interval) != digests


def test_losses_differ_between_steps_and_data_is_read_on(tmp_path):
    """Guards the test above: equal batches in every step would hide a wrong position."""
    trainer = make_trainer(make_config(tmp_path))
    rows = [tuple(trainer.datasets.train[i]["tokens"].tolist()) for i in range(6 * BATCH)]
    assert len(set(rows)) > 5 * BATCH


def test_a_finished_run_started_again_does_nothing(tmp_path):
    # Synthetic rows: exactly as many as the run reads.
    sections = {"data": {"source": "synthetic", "paths": []}}
    train(tmp_path, **sections)
    before = records(tmp_path), saved_digests(tmp_path, 6)
    again = train(tmp_path, **sections)
    assert (again.step, again.loss, again.reason) == (6, None, "finished")
    assert (records(tmp_path), saved_digests(tmp_path, 6)) == before


def test_a_run_of_no_steps_saves_the_initial_weights(tmp_path):
    result = train(tmp_path, train={"steps": 0}, optimizer={"lr_warmup_steps": 0})
    assert (result.step, result.reason) == (0, "finished")
    trainer = make_trainer(make_config(tmp_path))
    assert_bitwise(saved_state(tmp_path, trainer, 0), gathered(trainer.program.init_state()))


# -- when it saves and stops -------------------------------------------------------------------


def test_seven_steps_with_interval_five_leave_five_and_seven(tmp_path):
    train(tmp_path, train={"steps": 7}, checkpoint={"interval": 5})
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["5", "7"]


def test_time_limit_stops_cleanly_with_a_checkpoint(tmp_path):
    result = train(tmp_path, train={"exit_duration_min": 1e-9})
    assert (result.step, result.reason) == (1, "exit_duration_min")
    assert len(records(tmp_path)) == 1
    # The limit is of a launch, not of the run; the next one goes on.
    assert train(tmp_path, train={"exit_duration_min": 1e-9}).step == 2
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


# -- options mean what they say ----------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run that stopped after three of six steps."""
    folder = tmp_path_factory.mktemp("saved")
    train(folder, train={"exit_interval": 3})
    return folder


def test_a_missing_checkpoint_to_load_is_an_error(tmp_path, saved):
    with pytest.raises(CheckpointError, match="checkpoint.load: .*/nowhere does not exist"):
        train(tmp_path, checkpoint={"load": str(tmp_path / "nowhere")})
    with pytest.raises(CheckpointError, match="checkpoint.load_step: .* no step 2"):
        train(tmp_path, checkpoint={"load": str(saved / "checkpoints"), "load_step": 2})
    assert not (tmp_path / "run").exists()


def test_an_empty_folder_starts_from_scratch_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert train(tmp_path, train={"exit_interval": 1}).step == 1
    assert "starting from scratch" in caplog.text
    assert str(tmp_path / "checkpoints") in caplog.text


def test_finetune_takes_the_weights_alone(tmp_path, saved):
    trainer = make_trainer(
        make_config(tmp_path, checkpoint={"load": str(saved / "checkpoints"), "finetune": True})
    )
    state, step, consumed = trainer._start()
    assert (step, consumed) == (0, 0)
    expected = gathered(make_trainer(make_config(tmp_path)).program.init_state())
    weights = {
        name: array
        for name, array in saved_state(saved, trainer, 3).items()
        if name.startswith("['params']")
    }
    assert_bitwise(gathered(state), expected | weights)
    assert any(not np.array_equal(expected[name], weights[name]) for name in weights)


def test_a_fresh_optimizer_keeps_the_learning_rate_plan(tmp_path, saved):
    """no_load_optim: the moments are zero, but the rate that is logged is the one that is used."""
    trainer = make_trainer(
        make_config(
            tmp_path,
            data={"paths": [str(saved / "corpus")]},
            checkpoint={"load": str(saved / "checkpoints"), "no_load_optim": True},
        )
    )
    state, step, consumed = trainer._start()
    assert (step, consumed, int(state["step"]), int(state["updates"])) == (3, 24, 3, 3)
    adam, _, schedule = state["opt_state"]
    assert isinstance(schedule, optax.ScaleByScheduleState)
    assert int(schedule.count) == 3
    assert int(adam.count) == 0
    assert not any(array.any() for array in gathered((adam.mu, adam.nu)).values())


def test_a_fresh_optimizer_is_sharded_like_the_old_one(saved, tmp_path):
    program = make_trainer(make_config(tmp_path, parallel={"fsdp": 8})).program
    state = program.init_state()
    fresh = with_fresh_optimizer(program, {"params": state["params"]})
    assert_bitwise(gathered(fresh), gathered(state))
    for name, shardings in program.state_shardings.items():
        assert jax.tree.map(lambda leaf: leaf.sharding, fresh[name]) == shardings


def test_another_architecture_lists_every_key_that_differs(tmp_path, saved):
    with pytest.raises(CheckpointError) as raised:
        train(
            tmp_path,
            model={"num_layers": 3, "rotary_base": 5000.0, "ffn_hidden_size": 48},
            checkpoint={"load": str(saved / "checkpoints"), "finetune": True},
        )
    message = str(raised.value)
    assert "model.num_layers: 2 in the checkpoint, 3 now" in message
    assert "model.rotary_base: 10000.0 in the checkpoint, 5000.0 now" in message
    assert "model.ffn_hidden_size: 64 in the checkpoint, 48 now" in message
    assert "hidden_size: 32" not in message


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"train": {"global_batch_size": 16}}, "train.global_batch_size: 8 in the checkpoint, 16"),
        ({"train": {"seed": 5}}, "train.seed: 1234 in the checkpoint, 5"),
        ({"data": {"split": "50,50,0"}}, "data.split: '80,20,0' in the checkpoint, '50,50,0'"),
    ],
)
def test_another_order_of_samples_is_refused(saved, sections, named):
    with pytest.raises(CheckpointError) as raised:
        train(saved, **sections)
    assert named in str(raised.value)
    assert "checkpoint.finetune=true" in str(raised.value)
    assert len(records(saved)) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 5e-3),
        ("min_lr", 5e-4),
        ("lr_decay_style", "linear"),
        ("lr_decay_steps", 12),
        ("lr_warmup_steps", 1),
        ("lr_warmup_init", 1e-4),
    ],
)
def test_another_learning_rate_plan_is_refused(saved, key, value):
    with pytest.raises(CheckpointError) as raised:
        train(saved, optimizer={key: value})
    message = str(raised.value)
    assert f"optimizer.{key}: " in message and f"{value!r} now" in message
    assert "optimizer.override_opt_param_scheduler=true" in message


def test_more_steps_are_another_plan_unless_the_rate_does_not_decay(tmp_path):
    decaying = {"optimizer": {"lr_decay_steps": None}}
    config = make_config(tmp_path, **decaying)
    longer = make_config(tmp_path, **decaying, train={"steps": 9})
    with pytest.raises(CheckpointError, match=r"train\.steps: 6 in the checkpoint, 9 now"):
        check_continuation(longer, run_meta(config, 24), "here")
    flat = {"optimizer": {"lr_decay_style": "constant", "lr_decay_steps": None}}
    check_continuation(
        make_config(tmp_path, **flat, train={"steps": 9}),
        run_meta(make_config(tmp_path, **flat), 24),
        "here",
    )


def test_a_value_that_nothing_reads_may_be_removed_between_launches(tmp_path):
    """Earlier versions took it; the run that goes on may not have it any more."""
    idle = {"optimizer": {"lr_wsd_decay_style": "linear"}, "data": {"fim_spm_rate": 0.2}}
    meta = run_meta(make_config(tmp_path, **idle), 24)
    check_continuation(make_config(tmp_path), meta, "here")
    with pytest.raises(ConfigError, match="lr_wsd_decay_style is linear, but optimizer.lr_decay_s"):
        train(tmp_path, **idle)
    read = {"optimizer": {"lr_decay_style": "WSD", "lr_wsd_decay_steps": 2}}
    meta = run_meta(make_config(tmp_path, **read), 24)
    read["optimizer"]["lr_wsd_decay_style"] = "linear"
    with pytest.raises(CheckpointError, match="lr_wsd_decay_style: 'exponential' in the check"):
        check_continuation(make_config(tmp_path, **read), meta, "here")


def test_an_overridden_plan_is_followed_from_the_step_it_resumes_at(tmp_path, saved):
    """Linear from 4e-3 to 1e-3 over the steps 2 to 8: updates 3, 4 and 5 use these rates."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    result = train(
        tmp_path,
        data={"paths": [str(saved / "corpus")]},
        optimizer={
            "lr": 4e-3,
            "lr_decay_style": "linear",
            "lr_decay_steps": 8,
            "override_opt_param_scheduler": True,
        },
    )
    assert result.step == 6
    rates = [record["lr"] for record in steps(tmp_path)]
    # Before: warm-up over two steps to 1e-2.
    np.testing.assert_allclose(rates, [0, 5e-3, 1e-2, 3.5e-3, 3e-3, 2.5e-3], rtol=1e-6)


def test_a_checkpoint_from_before_a_key_existed_counts_as_its_default(tmp_path):
    config = make_config(tmp_path)
    meta = json.loads(json.dumps(run_meta(config, 24)))
    del meta["config"]["model"]["qk_layernorm"]
    check_architecture(config, meta, "here")
    with pytest.raises(CheckpointError, match="qk_layernorm: False in the checkpoint, True now"):
        check_architecture(make_config(tmp_path, model={"qk_layernorm": True}), meta, "here")


def test_a_checkpoint_of_another_program_is_not_continued(tmp_path, saved):
    config = make_config(tmp_path)
    check_architecture(config, {}, "here")
    with pytest.raises(CheckpointError, match=r"does not record .* checkpoint\.finetune=true"):
        check_continuation(config, {}, "here")
