"""What training does to a model with experts: buffers, balance, metrics, evaluation, restart."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.errors import CheckpointError, ConfigError
from jaxtron.layers.moe.step import load_metrics, rows_of_layers
from jaxtron.program import Program
from jaxtron.resume import check_architecture, run_meta, with_fresh_optimizer
from tests.moe.arms import BIAS, LATENT, T_MOE
from tests.moe.block import model_config
from tests.parity.harness import assert_close_leaves, make_batch, make_config, rows_of
from tests.program.jaxprs import equations


def program_of(
    model: dict[str, Any], parallel: dict[str, Any] | None = None, **raw: Any
) -> Program:
    devices = 1
    for size in (parallel or {}).values():
        devices *= size
    config = make_config(model={**T_MOE, **model}, parallel=parallel, **raw)
    return Program(config, jax.devices()[:devices])


@functools.lru_cache
def biased() -> Program:
    return program_of(BIAS)


def bias_of(state: Any) -> np.ndarray:
    return np.asarray(state["params"]["layers"]["moe"]["router"]["expert_bias"])


def test_the_bias_is_in_the_state_and_the_optimizer_does_not_know_it() -> None:
    state = program_of(BIAS, optimizer={"name": "adamw"}).placed_state()
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert [n for n in names if "expert_bias" in n] == [
        "['params']['layers']['moe']['router']['expert_bias']"
    ]


def test_the_bias_follows_the_loads_of_the_step() -> None:
    program = biased()
    state = program.init_state()
    rows = make_batch(program.config)
    batch = rows_of(program, rows)
    load = np.asarray(program._with_report(state["params"], batch, 0, 1.0)[3]["load"])
    assert load.dtype == np.int32
    # a token is live when a valid label stands at its place or behind it
    live = np.maximum.accumulate(rows["loss_mask"][:, ::-1], axis=1).sum()
    assert load.sum(axis=1).tolist() == [2 * live] * 2
    before = bias_of(state)
    state, _ = program.train_step(state, batch)
    expected = before + 0.05 * np.sign(load.mean(axis=1, keepdims=True) - load)
    np.testing.assert_allclose(bias_of(state), expected, atol=1e-7)


def test_the_bias_balances_the_load() -> None:
    program = program_of(BIAS | {"moe_router_bias_update_rate": 0.01})
    state = program.init_state()
    batch = rows_of(program, make_batch(program.config, ragged=False))
    excess = []
    for _ in range(40):
        state, metrics = program.train_step(state, batch)
        excess.append(float(metrics["moe_load_max"]) - 1)
    assert np.mean(excess[-5:]) < excess[0] / 2, excess


def test_dense_first_layers_are_recomputed_like_the_others() -> None:
    """They are computed with the embedding; recomputation of a layer is one operation."""
    train = {"recompute": "full", "layer_loop": "unroll"}
    program = program_of(LATENT, train=train)
    params = program.abstract_state()["params"]
    batch = rows_of(program, make_batch(program.config))
    jaxpr = jax.make_jaxpr(program.loss_and_gradients)(params, batch).jaxpr
    recomputed = [e for e in equations(jaxpr) if e.primitive.name in ("checkpoint", "remat2")]
    assert len(recomputed) == LATENT["num_layers"]


def known_choices(model: dict[str, Any]) -> tuple[Program, Any, dict[str, np.ndarray]]:
    """A program, a state and rows in which biases alone choose the experts.

    Those of layers 0 and 1 and of depths 1 and 2 are (0, 1), (2, 3), (4, 5) and (6, 7); scores are
    less than 1.
    """
    program = program_of(BIAS | {"mtp_num_layers": 2} | model)
    state = program.init_state()
    favour = np.zeros((4, 8), np.float32)
    for place in range(4):
        favour[place, 2 * place : 2 * place + 2] = 9
    params = state["params"]
    routers = [params[name]["layer"]["moe"]["router"] for name in ("mtp_0", "mtp_1")]
    params["layers"]["moe"]["router"]["expert_bias"] = jnp.asarray(favour[:2])
    for depth, router in enumerate(routers):
        router["expert_bias"] = jnp.asarray(favour[2 + depth])
    return program, state, make_batch(program.config)


def test_the_bias_of_a_depth_moves_against_its_own_load() -> None:
    """The two experts that were chosen have more than the mean load, the six others none."""
    program, state, rows = known_choices({})
    after, _ = program.train_step(state, rows_of(program, rows))
    for depth in range(2):
        expected = np.full(8, 0.05)
        expected[4 + 2 * depth : 6 + 2 * depth] = 9 - 0.05
        router = after["params"][f"mtp_{depth}"]["layer"]["moe"]["router"]
        np.testing.assert_allclose(router["expert_bias"], expected, atol=1e-6)


def test_metrics_of_loads_are_of_layers_and_depths() -> None:
    """Each has two experts with all of the load, four times the mean, and six without."""
    program, state, rows = known_choices({"moe_per_layer_logging": True})
    _, metrics = program.train_step(state, rows_of(program, rows))
    names = {"layer_0", "layer_1", "mtp_1", "mtp_2"}
    logged = {name.partition("/")[2] for name in metrics if name.startswith("moe_load")}
    assert logged == {"", *names}
    for suffix in ["", *(f"/{name}" for name in names)]:
        assert float(metrics[f"moe_load_max{suffix}"]) == 4
        assert float(metrics[f"moe_load_min{suffix}"]) == 0
    assert int(metrics["moe_idle_experts"]) == 4 * 6
    for name in names:
        assert int(metrics[f"moe_load_under_0.5/{name}"]) == 6
        assert int(metrics[f"moe_load_over_2/{name}"]) == 2


def test_metrics_of_loads_by_hand() -> None:
    """Means of 4 and 5; one expert of each layer has a single token."""
    load = np.array([[1, 3, 5, 7], [0, 1, 7, 12]], np.int32)
    metrics = load_metrics(load, np.array([0.5, 0.25]), ["layer_2", "mtp_1"], per_layer=True)
    expected = {
        "moe_aux_loss": 0.75,
        "moe_load_max": 2.4,
        "moe_load_min": 0.0,
        "moe_idle_experts": 1,
        "moe_load_max/layer_2": 1.75,
        "moe_load_min/layer_2": 0.25,
        "moe_load_max/mtp_1": 2.4,
        "moe_load_min/mtp_1": 0.0,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(float(metrics[name]), value, rtol=1e-6, err_msg=name)
    busy = load_metrics(load[:1], np.zeros(1), ["layer_2"], per_layer=False)
    assert float(busy["moe_load_min"]) == 0.25 and int(busy["moe_idle_experts"]) == 0
    assert not [name for name in busy if "/" in name]


@pytest.mark.parametrize(
    ("freq", "order", "rows"),
    [
        ([0, 1, 1, 1], [0, 2, 1], {1: 0, 3: 1, 2: 2}),
        (2, [1, -1, 0], {2: 0, 0: 2}),
        ([0, 0, 0, 1, 1, 0, 1, 1], [1, 0], {6: 0, 7: 1, 3: 2, 4: 3}),
    ],
    ids=["dense first", "every second layer", "blocks of three"],
)
def test_rows_of_the_loads_belong_to_layers(freq: Any, order: list[int], rows: Any) -> None:
    layers = len(freq) if isinstance(freq, list) else 4
    model = model_config(num_layers=layers, moe_layer_freq=freq)
    assert rows_of_layers(model, order) == rows


def test_per_layer_loads_are_logged_on_request() -> None:
    program = program_of({"moe_per_layer_logging": True, "mtp_num_layers": 2})
    state = program.init_state()
    batch = rows_of(program, make_batch(program.config))
    report, _, ahead = program._with_report(state["params"], batch, 0, 1.0)[3:6]
    loads = dict(zip(("layer_0", "layer_1"), np.asarray(report["load"]), strict=True))
    loads |= {f"mtp_{i + 1}": np.asarray(entry["layer"]["load"]) for i, entry in enumerate(ahead)}
    _, metrics = program.train_step(state, batch)
    for name, load in loads.items():
        for what, value in (("max", load.max()), ("min", load.min())):
            actual = float(metrics[f"moe_load_{what}/{name}"])
            np.testing.assert_allclose(actual, value / load.mean(), rtol=1e-6)
    assert len({float(metrics[f"moe_load_max/{name}"]) for name in loads}) == 4


def test_experts_of_each_layer_are_counted_by_their_load() -> None:
    """Means of 10 and of 0; a load at the edge of two bins is in the upper one."""
    load = np.array([[0, 4, 5, 8, 12, 12, 19, 20], [0, 0, 0, 0, 0, 0, 0, 0]], np.int32)
    metrics = load_metrics(load, np.zeros(2), ["layer_0", "layer_5"], per_layer=True)
    bins = ["under_0.5", "0.5_to_0.8", "0.8_to_1.25", "1.25_to_2", "over_2"]
    assert [int(metrics[f"moe_load_{name}/layer_0"]) for name in bins] == [2, 1, 3, 1, 1]
    assert [int(metrics[f"moe_load_{name}/layer_5"]) for name in bins] == [8, 0, 0, 0, 0]


@pytest.mark.parametrize("target", [{"expert": 4}, {"expert": 2, "tensor": 2}], ids=str)
def test_a_checkpoint_resumes_on_another_mesh(tmp_path: Any, target: dict[str, int]) -> None:
    source = biased()
    state = source.init_state()
    state, _ = source.train_step(state, rows_of(source, make_batch(source.config)))
    config = CheckpointConfig(dir=str(tmp_path), interval=1)
    with Checkpointer(config) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        other = program_of(BIAS, target)
        restored, _ = checkpointer.restore(1, other.abstract_state())
    restored = other.from_logical(restored)
    weights_only = {"params": jax.tree.map(jnp.copy, restored["params"])}
    fresh = with_fresh_optimizer(other, weights_only)
    assert jax.tree.structure(fresh["opt_state"]) == jax.tree.structure(state["opt_state"])
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_resumed_run_may_dispatch_and_balance_otherwise() -> None:
    def config(**model: Any) -> Any:
        return make_config(model={**T_MOE, **BIAS, "mtp_num_layers": 1, **model})

    meta = run_meta(config(), 0)
    # as DeepSeek-V3's recipe at its end: the bias stands still, and further tokens weigh less
    changes = {"moe_router_bias_update_rate": 0.0, "mtp_loss_scaling_factor": 0.05}
    dispatch = {"moe_token_dispatcher_type": "allgather", "moe_grouped_gemm_backend": "xla"}
    losses = {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "aux_loss"}
    check_architecture(config(**changes, **dispatch, **losses), meta, "the checkpoint")
    for other in ({"moe_router_topk": 1}, {"moe_router_topk_scaling_factor": 2.0}):
        with pytest.raises(CheckpointError, match=f"model.{next(iter(other))}"):
            check_architecture(config(**other), meta, "the checkpoint")
    balanced = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
    with pytest.raises(CheckpointError, match="model.moe_router_load_balancing_type"):
        check_architecture(
            make_config(model=T_MOE | balanced), run_meta(make_config(model=T_MOE), 0), "it"
        )


def test_evaluation_does_not_jitter_and_counts_valid_tokens() -> None:
    jittered = program_of({"moe_input_jitter_eps": 0.5})
    plain = program_of({})
    state = plain.init_state()
    batch = rows_of(plain, make_batch(plain.config, ragged=False))
    a = jittered.eval_step(state["params"], batch)
    b = plain.eval_step(state["params"], batch)
    np.testing.assert_array_equal(np.asarray(a[0]), np.asarray(b[0]))
    assert int(a[1]) == 32 * 16


def test_evaluation_chooses_without_sinkhorn() -> None:
    """For two experts a token: by a softmax over all experts, like the router that has no loss."""
    own = {"moe_aux_loss_coeff": 0.0, "moe_router_pre_softmax": True}
    sinkhorn = program_of({"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "sinkhorn"})
    plain = program_of({**own, "moe_router_load_balancing_type": "none"})
    params = plain.init_state()["params"]
    batch = rows_of(plain, make_batch(plain.config))
    loss, tokens = (float(n) for n in sinkhorn.eval_step(params, batch))
    expected, _ = (float(n) for n in plain.eval_step(params, batch))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    trained = float(jax.jit(sinkhorn.loss_and_gradients)(params, batch)[0])
    assert abs(trained - expected / tokens) > 1e-5


def test_router_losses_carry_the_loss_scale() -> None:
    program = program_of({"moe_aux_loss_coeff": 1.0})
    params = program.init_state()["params"]
    batch = rows_of(program, make_batch(program.config))
    plain = jax.jit(program.loss_and_gradients)(params, batch)[2]
    scaled = jax.jit(lambda p, b, s: program.loss_and_gradients(p, b, 0, s))(params, batch, 512.0)[
        2
    ]
    assert_close_leaves(scaled, plain, 2e-5, "gradient")


def test_the_ragged_exchange_is_refused_where_xla_has_none() -> None:
    ragged = {"moe_token_dispatcher_type": "ragged"}
    with pytest.raises(ConfigError, match="set it to alltoall"):
        program_of(ragged, {"expert": 2})
    program_of(ragged)  # nothing to exchange


@pytest.mark.parametrize(
    ("backend", "reason"), [("padded", "without a capacity"), ("mosaic_gpu", "this is a cpu")]
)
def test_a_kernel_that_cannot_work_is_refused_before_anything_is_compiled(
    backend: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"moe_grouped_gemm_backend={backend}.*{reason}"):
        program_of({"moe_grouped_gemm_backend": backend})
