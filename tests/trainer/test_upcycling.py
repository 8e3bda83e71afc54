"""A model with experts that starts from a dense checkpoint."""

import numpy as np
import pytest

from jaxtron.errors import CheckpointError, ConfigError
from tests.trainer.runs import gathered, make_config, make_trainer, saved_state, train

FOUR = {"num_layers": 4}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    train(folder, model=FOUR, train={"steps": 2})
    return folder


def upcycle(tmp_path, dense, model=EXPERTS, parallel=None):
    return make_trainer(
        make_config(
            tmp_path,
            model=FOUR | model,
            parallel=parallel or {},
            checkpoint={"load": str(dense / "checkpoints"), "moe_use_upcycling": True},
        )
    )


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (EXPERTS, {"expert": 2, "tensor": 2}),
        (EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]}, {}),
        (EXPERTS | {"moe_layer_freq": 2}, {}),
        (EXPERTS, {"pipeline": 2, "expert": 2}),
    ],
    ids=["expert2-tensor2", "dense first", "every second layer", "pipeline2-expert2"],
)
def test_it_computes_what_the_dense_model_does(tmp_path, dense, model, parallel) -> None:
    """The weights of a token's experts add up to 1, and all experts are alike."""
    before = make_trainer(make_config(tmp_path, model=FOUR, train={"steps": 2}))
    loaded = {"load": str(dense / "checkpoints"), "finetune": True}
    start, _, _ = make_trainer(make_config(tmp_path, model=FOUR, checkpoint=loaded))._start()
    after = upcycle(tmp_path, dense, model, parallel)
    state, step, consumed = after._start()
    assert (step, consumed, int(state["step"])) == (0, 0, 0)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (8, 17), dtype=np.int32)
    mask = np.ones((8, 16), np.float32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}
    losses = [
        float(trainer.program.eval_step(weights["params"], trainer.program.place(batch))[0])
        for trainer, weights in ((before, start), (after, state))
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    _, metrics = after.program.train_step(state, after.program.place(batch))
    assert np.isfinite(float(metrics["grad_norm"]))


def test_experts_are_copies_and_routers_are_new(tmp_path, dense) -> None:
    trainer = upcycle(tmp_path, dense)
    state = gathered(trainer._start()[0]["params"])
    old = saved_state(dense, make_trainer(make_config(tmp_path, model=FOUR)), 2)
    for name in ("up", "down"):
        mlp = old[f"['params']['layers']['mlp']['{name}']"]
        experts = state[f"['layers']['moe']['experts']['{name}']"]
        assert experts.shape == (4, 4, *mlp.shape[1:])
        for e in range(4):
            np.testing.assert_array_equal(experts[:, e], mlp)
    new = gathered(trainer.program.init_state()["params"])
    router = "['layers']['moe']['router']['weight']"
    np.testing.assert_array_equal(state[router], new[router])


def test_what_cannot_be_copied_is_refused(tmp_path, dense) -> None:
    with pytest.raises(ConfigError, match="moe_ffn_hidden_size is 16 .* set .* to null"):
        upcycle(tmp_path, dense, EXPERTS | {"moe_ffn_hidden_size": 16})
    with pytest.raises(ConfigError, match=r"moe_use_upcycling is true, but model\.num_experts is"):
        upcycle(tmp_path, dense, {})
    with pytest.raises(CheckpointError, match=r"model\.num_layers: 4 in the checkpoint, 3"):
        upcycle(tmp_path, dense, EXPERTS | {"num_layers": 3})._start()


def test_a_dense_checkpoint_is_refused_with_the_way_to_take_it(tmp_path, dense) -> None:
    loaded = {"load": str(dense / "checkpoints"), "finetune": True}
    experts = make_trainer(make_config(tmp_path, model=FOUR | EXPERTS, checkpoint=loaded))
    with pytest.raises(CheckpointError, match=r"num_experts: None.*(?s:.)*moe_use_upcycling=true"):
        experts._start()
    other = make_trainer(make_config(tmp_path, model={"num_layers": 2}, checkpoint=loaded))
    with pytest.raises(CheckpointError) as error:
        other._start()
    assert "upcycling" not in str(error.value)
