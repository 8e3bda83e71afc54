"""Delayed scaling: histories and scales against NumPy, meshes, skipped steps, checkpoints (O16)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.parallel.gradient_sum import accumulate
from jaxtron.precision.fp8_delayed import DelayedScaling
from jaxtron.precision.fp8_weight import Fp8Gradient
from jaxtron.precision.quantise import E4M3, E5M2
from jaxtron.program import Program
from tests.parity.harness import (
    assert_close_leaves,
    assert_replicas_equal,
    make_batch,
    make_config,
    rows_of,
)
from tests.precision import emulation
from tests.precision.test_fp8_product import draw, error, fp8_weights, run
from tests.trainer import runs


def scaling(length: int = 3, algorithm: Any = "max", tokens: int = 64) -> DelayedScaling:
    return DelayedScaling(("a/down", "a/up"), 2, length, algorithm, (E4M3, E5M2), tokens)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_histories_and_scales_equal_numpy(algorithm: str) -> None:
    delayed = scaling(algorithm=algorithm)
    state = delayed.init()
    rng = np.random.default_rng(1)
    seen: list[np.ndarray] = []
    for _ in range(5):
        amax = np.exp(rng.standard_normal((2, 2, 2)) * 3).astype(np.float32)
        seen.insert(0, amax)
        state = delayed.update(state, {"a/down": amax[:, 0], "a/up": amax[:, 1]})
        taken = np.max(seen[:3], axis=0) if algorithm == "max" else amax
        expected = np.empty((2, 2, 2), np.float32)
        for index, value in np.ndenumerate(taken):
            expected[index] = emulation.scale(value, ("e4m3", "e5m2")[index[-1]])
        np.testing.assert_array_equal(state["layers"]["scale"], expected)
    history = np.moveaxis(np.asarray(state["layers"]["amax_history"]), -1, 0)
    np.testing.assert_array_equal(history, seen[:3])


def test_the_first_scales_are_one_and_a_tokens_share() -> None:
    scale = np.asarray(scaling(tokens=64).init()["layers"]["scale"])
    assert scale.shape == (2, 2, 2)
    assert (scale[..., 0] == 1).all() and (scale[..., 1] == 1 / 64).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_what_is_not_finite_is_not_entered(bad: float, algorithm: str) -> None:
    delayed = scaling(length=1, algorithm=algorithm)
    good = np.full((2, 2), 5.0, np.float32)
    before = delayed.update(delayed.init(), {"a/down": good, "a/up": good})
    broken = good.copy()
    broken[1, 0] = bad
    after = delayed.update(before, {"a/down": good, "a/up": broken})
    np.testing.assert_array_equal(after["layers"]["scale"], before["layers"]["scale"])
    assert np.isfinite(np.asarray(after["layers"]["amax_history"])).all()


def test_a_product_with_given_scales_equals_numpy_and_measures_what_it_met() -> None:
    x, w, g = draw(6, 8), draw(8, 12), draw(6, 12) * 1e-3
    by_x, by_g = np.float32(0.0037841797), np.float32(2.0**-26)  # x saturates, both bf16 numbers
    (weight,) = fp8_weights([w])
    empty = Fp8Gradient(weight.gradient.weight, jnp.zeros(2))
    weight = dataclasses.replace(weight, scales=jnp.stack([by_x, by_g]), gradient=empty)
    outputs, dx, (dw,) = run(x, [weight], [g])
    qx, qg = emulation.quantised(x, "e4m3", by_x), emulation.quantised(g, "e5m2", by_g)
    qw = emulation.quantised(w, "e4m3")
    assert np.max(np.abs(qx)) == 448 * by_x < np.max(np.abs(x))
    assert error(outputs[0], qx @ qw) < 1e-6
    assert error(dx, qg @ qw.T) < 1e-6
    assert error(dw, qx.T @ qg) < 1e-6


def test_microbatches_are_joined_by_their_maximum() -> None:
    first = Fp8Gradient(jnp.ones(3), jnp.array([2.0, 5.0]))
    total = accumulate({"w": first}, {"w": Fp8Gradient(jnp.ones(3), jnp.array([7.0, 1.0]))})
    np.testing.assert_array_equal(total["w"].amax, [7, 5])
    np.testing.assert_array_equal(total["w"].weight, [2, 2, 2])


# -- training -------------------------------------------------------------------------------------


def program(parallel: dict[str, Any] | None = None, **sections: Any) -> Program:
    precision = {"fp8": "delayed", "fp8_amax_history_len": 2, **sections.pop("precision", {})}
    config = make_config(
        model={"num_layers": 2}, parallel=parallel, precision=precision, **sections
    )
    count = int(np.prod([v for v in (parallel or {}).values() if type(v) is int], initial=1))
    return Program(config, jax.devices()[:count])


def trained(p: Program, steps: int = 3) -> dict[str, Any]:
    """Metrics and the final state in logical order, as arrays."""
    state, metrics = p.init_state(), []
    for step in range(steps):
        state, found = p.train_step(state, rows_of(p, make_batch(p.config, step)))
        metrics.append(jax.tree.map(float, found))
    assert_replicas_equal(state)
    return {"metrics": metrics, "state": jax.tree.map(np.asarray, p.to_logical(state))}


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, Any]:
    return trained(program(train={"num_microbatches": 1}))


@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        ({}, {"num_microbatches": 4, "layer_loop": "unroll"}),
        (
            {"fsdp": 2, "context": 2, "data_sharding": "optim_grads_params"},
            {"num_microbatches": 2, "recompute": "full"},
        ),
        ({"pipeline": 2, "tensor": 2}, {"num_microbatches": 4}),
        ({"pipeline": 4, "pipeline_layout": "Et|t||L"}, {"num_microbatches": 4}),
        ({"tensor": 2, "tp_comm_overlap": True}, {"num_microbatches": 2}),
    ],
)
def test_neither_mesh_nor_microbatches_change_a_run(
    parallel: dict[str, Any], train: dict[str, Any], on_one_device: dict[str, Any]
) -> None:
    result = trained(program(parallel, train=train))
    for actual, expected in zip(result["metrics"], on_one_device["metrics"], strict=True):
        np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(actual["grad_norm"], expected["grad_norm"], rtol=1e-3)
    actual, expected = result["state"], on_one_device["state"]
    assert_close_leaves(actual["params"], expected["params"], 1e-3, "parameter")
    assert_close_leaves(actual["fp8"], expected["fp8"], 1e-2, "fp8")


def test_with_global_scope_an_evaluation_equals_one_device() -> None:
    """It has scales of the tensors themselves."""
    losses = []
    for parallel in ({}, {"data": 2, "tensor": 2}):
        p = program(parallel, precision={"fp8_amax_scope": "global"}, train={"num_microbatches": 2})
        loss, _ = p.eval_step(p.init_state()["params"], rows_of(p, make_batch(p.config)))
        losses.append(float(loss))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_the_history_holds_every_product_of_every_layer(on_one_device: dict[str, Any]) -> None:
    fp8 = on_one_device["state"]["fp8"]["layers"]
    assert fp8["amax_history"].shape == (2, 4, 2, 2)
    assert (fp8["amax_history"] > 0).all()
    # inputs of query/key/value and of the MLP come out of RMSNorm: sqrt(64) at most
    assert (fp8["amax_history"][:, [1, 3], 0] <= 8).all()
    largest = fp8["amax_history"].max(axis=-1)
    for index, amax in np.ndenumerate(largest):
        assert fp8["scale"][index] == emulation.scale(amax, ("e4m3", "e5m2")[index[-1]])


def test_with_standing_weights_it_comes_to_the_scales_of_the_tensors_themselves() -> None:
    still = {"lr": 0.0, "min_lr": 0.0}
    p = program(optimizer=still, precision={"fp8_amax_compute_algo": "most_recent"})
    batch = rows_of(p, make_batch(p.config))
    state = p.init_state()
    for _ in range(8):
        state, metrics = p.train_step(state, batch)
    current = program(optimizer=still, precision={"fp8": "current", "fp8_amax_history_len": 1024})
    _, expected = current.train_step(current.init_state(), batch)
    assert float(metrics["loss"]) == float(expected["loss"])
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-6)


def test_an_infinite_activation_reaches_the_loss_but_not_the_history() -> None:
    p = program(optimizer={"grad_norm_skip_threshold": 1e9})
    batch = rows_of(p, make_batch(p.config))
    state, _ = p.train_step(p.init_state(), batch)
    scale = state["params"]["layers"]["attention_norm"]["weight"]
    broken = np.array(scale)
    broken[1, 3] = np.inf
    state["params"]["layers"]["attention_norm"]["weight"] = jax.device_put(broken, scale.sharding)
    before = np.array(state["fp8"]["layers"]["scale"])
    state, metrics = p.train_step(state, batch)
    assert np.isnan(float(metrics["loss"])) and int(metrics["skipped"]) == 1
    after = state["fp8"]["layers"]
    assert np.isfinite(np.asarray(after["amax_history"])).all()
    np.testing.assert_array_equal(after["scale"][1], before[1])
    assert (np.asarray(after["scale"]) > 0).all()


# -- checkpoints ----------------------------------------------------------------------------------

DELAYED = {"fp8": "delayed", "fp8_amax_history_len": 4}


def test_a_resumed_run_goes_on_bitwise(tmp_path: Path) -> None:
    whole = runs.make_config(tmp_path / "whole", precision=DELAYED)
    runs.make_trainer(whole).fit()
    cut = runs.make_config(tmp_path / "cut", precision=DELAYED, train={"exit_interval": 3})
    runs.make_trainer(cut).fit()
    trainer = runs.make_trainer(cut)
    assert trainer.fit().step == 6
    expected = runs.saved_state(tmp_path / "whole", trainer, 6)
    runs.assert_bitwise(runs.saved_state(tmp_path / "cut", trainer, 6), expected)
    assert any("amax_history" in name for name in expected)


def test_fp8_can_be_turned_off_and_on_between_launches(tmp_path: Path) -> None:
    for step, precision in ((2, DELAYED), (4, {}), (6, DELAYED)):
        config = runs.make_config(tmp_path, precision=precision, train={"exit_interval": 2})
        trainer = runs.make_trainer(config)
        assert trainer.fit().step == step
    history = runs.saved_state(tmp_path, trainer, 6)["['fp8']['layers']['amax_history']"]
    assert (history[..., :2] > 0).all() and not history[..., 2:].any()  # of two steps, begun anew
