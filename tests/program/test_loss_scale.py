"""fp16 with Megatron's dynamic loss scale: what an overflow changes, on every mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.errors import ConfigError
from jaxtron.objective import Objective
from jaxtron.optim.clip import clip_by_global_norm
from jaxtron.precision.loss_scale import LossScaler
from jaxtron.program import Program
from tests.parity.harness import assert_replicas_equal, make_batch, make_config, rows_of
from tests.program.forward import random_state


class MegatronScaler:
    """DynamicGradScaler of Megatron-LM, as its documentation describes it, in plain Python."""

    def __init__(self, initial: float, minimum: float, window: int, hysteresis: int) -> None:
        self.scale, self.minimum, self.window = initial, minimum, window
        self.hysteresis = self.overflows_left = hysteresis
        self.finite_steps = 0

    def step(self, overflow: bool) -> None:
        if overflow:
            self.finite_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.finite_steps += 1
        if self.finite_steps == self.window:
            self.finite_steps, self.overflows_left = 0, self.hysteresis
            self.scale *= 2


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_scale_moves_as_megatrons(hysteresis: int) -> None:
    scaler = LossScaler(64.0, minimum=4.0, window=3, hysteresis=hysteresis)
    state, expected = scaler.init(), MegatronScaler(64.0, 4.0, 3, hysteresis)
    rng = np.random.default_rng(hysteresis)
    update, seen = jax.jit(scaler.update), set()
    for overflow in rng.random(200) < np.repeat([0.15, 0.8, 0.1, 0.5], 50):
        state = update(state, ~jnp.bool_(overflow))
        expected.step(bool(overflow))
        assert float(state["scale"]) == expected.scale
        seen.add(expected.scale)
    assert min(seen) == 4.0 and max(seen) > 64.0  # both the floor and growth were reached


def test_a_window_written_out() -> None:
    """Hysteresis 2: the first overflow keeps the scale, later ones halve it until it has grown."""
    scaler = LossScaler(2.0**32, minimum=1.0, window=2, hysteresis=2)
    state, scales = scaler.init(), []
    for finite in (False, False, False, True, True, False, False):
        state = scaler.update(state, jnp.bool_(finite))
        scales.append(float(np.log2(state["scale"])))
    assert scales == [32, 31, 30, 30, 31, 31, 30]


MESHES: dict[str, dict[str, Any]] = {
    "fsdp 2, ZeRO-3": {"fsdp": 2, "data_sharding": "optim_grads_params"},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
}


def fp16_program(parallel: dict[str, Any], optimizer: str = "adamw", **precision: Any) -> Program:
    config = make_config(
        model={"num_layers": 1},
        parallel=parallel,
        train={"global_batch_size": 4},
        optimizer={"name": optimizer, "lr": 0.01, "lr_decay_style": "linear", "min_lr": 0.0},
        precision={"compute": "fp16", **precision},
    )
    devices = int(np.prod([v for v in parallel.values() if isinstance(v, int)], initial=1))
    return Program(config, jax.devices()[:devices])


def start(program: Program, std: float = 0.2) -> Any:
    """Random weights and moments that are the same on every mesh, and the first loss scale."""
    state = random_state(program, std=std)
    if program.scaler is not None:
        state["loss_scale"] = jax.device_put(program.scaler.init(), program.replicated)
    return state


@pytest.mark.parametrize("mesh", MESHES)
def test_an_overflow_on_one_shard_moves_nothing_anywhere(mesh: str) -> None:
    """One element of one weight is huge, so that only the shards that hold it overflow."""
    program = fp16_program(MESHES[mesh], initial_loss_scale=2.0**8, hysteresis=1)
    state = start(program)
    broken = np.array(state["params"]["layers"]["mlp"]["down"])
    broken[0, 0, 0] = 60000.0
    whole = state["params"]["layers"]["mlp"]["down"]
    state["params"]["layers"]["mlp"]["down"] = jax.device_put(broken, whole.sharding)
    before = jax.tree.map(np.array, state)
    state, metrics = program.train_step(state, rows_of(program, make_batch(program.config)))
    assert_replicas_equal(state)
    after = jax.tree.map(np.asarray, state)
    assert int(metrics["skipped"]) == 1 and float(metrics["loss_scale"]) == 2.0**8
    assert not np.isfinite(float(metrics["grad_norm"]))
    assert (int(after["step"]), int(after["updates"])) == (1, 0)
    assert float(after["loss_scale"]["scale"]) == 2.0**7
    for part in ("params", "opt_state"):  # moments, Adam's count and the schedule's
        jax.tree.map(np.testing.assert_array_equal, before[part], after[part])


def test_the_learning_rate_waits_for_a_step_that_counts() -> None:
    """From 2^24 on the scale halves until the gradients fit; the plan starts at the first that do.

    lr falls linearly from 0.01 over 3 steps: update i uses 0.01 (1 - i / 3).
    """
    program = fp16_program({}, initial_loss_scale=2.0**24, hysteresis=1)
    state, rates, skipped = start(program), [], []
    batch = rows_of(program, make_batch(program.config))
    for _ in range(16):
        state, metrics = program.train_step(state, batch)
        rates.append(float(metrics["lr"]))
        skipped.append(int(metrics["skipped"]))
    first = skipped.index(0)
    assert first > 0 and skipped[first] == 0
    assert program.train_step._cache_size() == 1  # whatever the scale
    assert int(state["updates"]) == skipped.count(0)
    np.testing.assert_allclose(rates[: first + 1], 0.01, rtol=1e-6)
    np.testing.assert_allclose(rates[first + 1], 0.01 * 2 / 3, rtol=1e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_scaled_gradients_are_the_gradients(mesh: str) -> None:
    """fp16 has 11 significant bits; the fp32 run on one device is the reference."""
    program = fp16_program(MESHES[mesh], initial_loss_scale=2.0**10)
    state = start(program, std=0.05)
    batch = rows_of(program, make_batch(program.config))
    loss, _, grads = jax.jit(program.loss_and_gradients)(
        state["params"], batch, 0, jnp.float32(2.0**10)
    )
    config = make_config(model={"num_layers": 1}, train={"global_batch_size": 4})
    exact = Program(config, jax.devices()[:1])
    rows = rows_of(exact, make_batch(config))
    weights = start(exact, std=0.05)["params"]
    expected_loss, _, expected = jax.jit(exact.loss_and_gradients)(weights, rows)
    np.testing.assert_allclose(float(loss), float(expected_loss), rtol=2e-3)
    for g, e in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(np.asarray(g) - np.asarray(e)) / np.linalg.norm(np.asarray(e))
        assert g.dtype == jnp.float32 and error < 1e-2


def test_the_scale_saves_gradients_that_fp16_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token weights of 1e-8 make output gradients below half of fp16's smallest number, 6e-8."""
    program = fp16_program({}, optimizer="sgd", initial_loss_scale=2.0**16)
    state = start(program, std=0.05)
    batch = make_batch(program.config, ragged=False)
    monkeypatch.setattr(Objective, "token_weights", lambda self, mask, total=None: mask * 1e-8)
    norms = [
        float(
            clip_by_global_norm(
                program.loss_and_gradients(
                    state["params"], rows_of(program, batch), 0, jnp.float32(scale)
                )[2],
                0.0,
            )[1]
        )
        for scale in (1.0, 2.0**16)
    ]
    assert norms[0] == 0.0 < norms[1]


def test_a_constant_scale_stays_and_still_skips() -> None:
    program = fp16_program({}, loss_scale=2.0**40)
    state = start(program)
    state, metrics = program.train_step(state, rows_of(program, make_batch(program.config)))
    assert int(metrics["skipped"]) == 1
    assert float(state["loss_scale"]["scale"]) == 2.0**40


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ({"compute": "bf16", "loss_scale": 8.0}, "set precision.loss_scale to null"),
        ({"compute": "fp16", "min_loss_scale": 8.0, "initial_loss_scale": 4.0}, "8 is more than"),
    ],
)
def test_what_means_nothing_is_refused(precision: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(precision=precision)
