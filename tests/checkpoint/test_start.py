"""The options that say where a run starts from mean what they say."""

import logging
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.errors import CheckpointError, ConfigError
from tests.checkpoint.states import abstract, mesh


def tree(step: int) -> dict:
    return {
        "params": {"w": jnp.full(4, step, jnp.float32)},
        "opt_state": {"mu": jnp.full(4, -step, jnp.float32)},
        "step": jnp.int32(step),
    }


@pytest.fixture
def earlier(tmp_path):
    """A finished run with steps 10 and 20."""
    with Checkpointer(CheckpointConfig(dir=str(tmp_path / "earlier"))) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, tree(step), {"consumed_samples": 8 * step})
    return tmp_path / "earlier"


def start(tmp_path, **keys):
    return Checkpointer(CheckpointConfig(dir=str(tmp_path / "run"), **keys)).start_point()


def refusal(tmp_path, **keys) -> str:
    with pytest.raises(CheckpointError) as caught:
        start(tmp_path, **keys)
    return str(caught.value)


def test_an_empty_folder_starts_fresh_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "jaxtron"):
        assert start(tmp_path) is None
    assert "starting from scratch" in caplog.text and str(tmp_path / "run") in caplog.text


def test_a_folder_whose_checkpoints_are_all_damaged_is_no_empty_folder(tmp_path, earlier):
    run = tmp_path / "run"
    shutil.copytree(earlier, run)
    (run / "10" / "manifest.json").write_text("{")
    (run / "20" / "manifest.json").unlink()
    message = refusal(tmp_path)
    assert "step 10: " in message and "step 20: " in message
    assert "move the folder away to start from scratch" in message
    assert refusal(tmp_path, load=str(earlier), finetune=True) == message
    shutil.rmtree(run)
    (run / "10.orbax-checkpoint-tmp").mkdir(parents=True)  # a first save that was killed
    assert start(tmp_path) is None


def test_a_relaunch_resumes_from_the_newest_step(earlier, caplog):
    checkpointer = Checkpointer(CheckpointConfig(dir=str(earlier)))
    with caplog.at_level(logging.INFO, "jaxtron"):
        found = checkpointer.start_point()
    assert found.step == 20 and "resuming from step 20" in caplog.text
    assert sorted(found.select(tree(0))) == ["opt_state", "params", "step"]


def test_load_takes_the_newest_the_given_or_the_pointed_at_step(tmp_path, earlier):
    assert start(tmp_path, load=str(earlier)).step == 20
    assert start(tmp_path, load=str(earlier), load_step=10).step == 10
    found = start(tmp_path, load=str(earlier / "10"))
    assert (found.step, found.directory) == (10, earlier)
    assert not found.weights_only and not found.fresh_optimizer


def test_finetune_takes_weights_alone(tmp_path, earlier):
    found = start(tmp_path, load=str(earlier), finetune=True)
    assert found.weights_only and list(found.select(tree(0))) == ["params"]
    checkpointer = Checkpointer(CheckpointConfig())
    like = found.select(abstract(tree(0), mesh(1, 1)))
    got, meta = checkpointer.restore(found.step, like, directory=found.directory)
    assert list(got) == ["params"] and np.all(np.asarray(got["params"]["w"]) == 20)
    assert meta == {"consumed_samples": 160}


def test_no_load_optim_takes_all_but_the_optimizer_state(tmp_path, earlier):
    found = start(tmp_path, load=str(earlier), no_load_optim=True)
    assert found.fresh_optimizer and not found.weights_only
    assert sorted(found.select(tree(0))) == ["params", "step"]


def test_a_relaunch_goes_on_with_its_own_steps_not_with_load(tmp_path, earlier):
    keys = {"load": str(earlier), "load_step": 10, "finetune": True}
    with Checkpointer(CheckpointConfig(dir=str(tmp_path / "run"), **keys)) as checkpointer:
        checkpointer.save(3, tree(3), {})
    found = start(tmp_path, **keys)
    assert (found.step, found.directory) == (3, tmp_path / "run")
    assert not found.weights_only and not found.fresh_optimizer


def test_loading_an_older_step_of_the_runs_own_folder_is_refused_with_the_way_out(earlier):
    checkpointer = Checkpointer(CheckpointConfig(dir=str(earlier), load=str(earlier), load_step=10))
    with pytest.raises(
        CheckpointError, match=r"holds later steps \(up to 20\).*prune .*--after 10"
    ):
        checkpointer.start_point()


def test_loading_the_runs_own_newest_step_applies_the_options(earlier):
    config = CheckpointConfig(dir=str(earlier), load=str(earlier), no_load_optim=True)
    found = Checkpointer(config).start_point()
    assert found.step == 20 and found.fresh_optimizer


def test_a_missing_path_or_step_is_refused(tmp_path, earlier):
    assert f"{tmp_path / 'nowhere'} does not exist" in refusal(
        tmp_path, load=str(tmp_path / "nowhere")
    )
    message = refusal(tmp_path, load=str(earlier), load_step=15)
    assert "holds no step 15. Complete steps: 10, 20" in message
    assert f"{earlier / '15'} does not exist" in refusal(tmp_path, load=str(earlier / "15"))
    (tmp_path / "empty").mkdir()
    assert "holds no complete checkpoint" in refusal(tmp_path, load=str(tmp_path / "empty"))


def test_a_step_folder_and_another_load_step_contradict(tmp_path, earlier):
    message = refusal(tmp_path, load=str(earlier / "10"), load_step=20)
    assert "folder of step 10 but checkpoint.load_step is 20" in message


def test_an_unfinished_step_given_by_path_is_refused(tmp_path, earlier):
    (earlier / "30.orbax-checkpoint-tmp").mkdir()
    assert "step 30" in refusal(tmp_path, load=str(earlier / "30"))


@pytest.mark.parametrize(
    "name, named",
    [
        ("latest_checkpointed_iteration.txt", "Megatron-LM"),
        ("__0_0.distcp", "PyTorch distributed"),
        ("model.safetensors", "Hugging Face"),
        ("5/_CHECKPOINT_METADATA", "Orbax checkpoint of another program"),
    ],
)
def test_other_programs_checkpoints_are_refused_by_name(tmp_path, name, named):
    file = tmp_path / "foreign" / name
    file.parent.mkdir(parents=True)
    file.write_text("")
    assert named in refusal(tmp_path, load=str(tmp_path / "foreign"))
    # As the run's own folder too: starting from scratch there would not be what was meant.
    with pytest.raises(CheckpointError, match=named):
        Checkpointer(CheckpointConfig(dir=str(tmp_path / "foreign"))).start_point()


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"load_step": 0}, r"checkpoint\.load_step is 0 but checkpoint\.load is null"),
        ({"no_load_optim": True}, r"checkpoint\.no_load_optim is true but"),
        ({"finetune": True}, r"checkpoint\.finetune is true but"),
        ({"interval": 5}, r"checkpoint\.interval is 5 but checkpoint\.dir is null"),
        ({"dir": "gs://bucket/run"}, r"checkpoint\.dir is 'gs://bucket/run'"),
    ],
)
def test_keys_that_cannot_work_together_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**keys)
