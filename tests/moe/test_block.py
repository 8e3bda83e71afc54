"""The block against a plain loop over tokens, and its edge cases (O22)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.block import (
    HIDDEN,
    SEQ,
    assert_same,
    block_parts,
    inputs_of,
    model_config,
    run_block,
)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def by_hand(config: Any, weights: Any, x: np.ndarray, live: np.ndarray) -> np.ndarray:
    """``sum_j p_j expert_j(x)`` of softmax-over-top-2 routing, token by token in float64."""
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), weights)
    y = np.zeros(x.shape)
    for b, t in np.argwhere(live > 0):
        v = x[b, t].astype(np.float64)
        logits = w["router"]["weight"] @ v
        top = np.argsort(-logits)[: config.moe_router_topk]
        p = np.exp(logits[top] - logits[top].max())
        for weight, e in zip(p / p.sum(), top, strict=True):
            up = np.einsum("h,hcf->cf", v, w["experts"]["up"][e])
            y[b, t] += weight * ((silu(up[0]) * up[1]) @ w["experts"]["down"][e])
    if "shared" in w:
        up = np.einsum("bsh,hcf->bscf", x, w["shared"]["up"])
        shared = (silu(up[:, :, 0]) * up[:, :, 1]) @ w["shared"]["down"]
        gate = x @ w["shared_gate"] if "shared_gate" in w else np.full(x.shape[:2], np.inf)
        y += shared / (1 + np.exp(-gate))[..., None]
    return y


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_router_topk": 3},
        {"moe_shared_expert_intermediate_size": 8},
        {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
    ],
)
def test_output_is_the_weighted_sum_of_the_chosen_experts(changes: dict[str, Any]) -> None:
    config, data = model_config(**changes), inputs_of()
    _, weights, _ = block_parts(config)
    expected = by_hand(config, weights, data["x"], data["token_weights"])
    np.testing.assert_allclose(run_block(config)["y"], expected, atol=2e-4)


def test_dropless_equals_unlimited_capacity() -> None:
    dropless = run_block(model_config())
    for policy in ("probs", "position"):
        limited = run_block(
            model_config(moe_expert_capacity_factor=1e6, moe_token_drop_policy=policy)
        )
        assert_same(limited, dropless, 1e-5)


def test_dropless_does_not_depend_on_the_kernel() -> None:
    assert_same(
        run_block(model_config(moe_grouped_gemm_backend="bucketed")),
        run_block(model_config()),
        1e-5,
    )


def test_dropped_tokens_have_no_output() -> None:
    config = model_config(moe_expert_capacity_factor=0.5, moe_router_topk=1)
    y = run_block(config)["y"]
    whole = run_block(model_config(moe_router_topk=1))["y"]
    dropped = np.all(y == 0, axis=-1)
    live = inputs_of()["token_weights"] > 0
    assert np.any(dropped & live) and not np.any(dropped & ~live & (whole != 0).any(-1))
    # fp32 sums in another order
    scale = np.abs(whole).max()
    np.testing.assert_allclose(y[~dropped], whole[~dropped], atol=1e-6 * scale)


@pytest.mark.parametrize("mesh", [{}, {"expert": 2, "tensor": 2}, {"context": 2}], ids=str)
def test_global_loss_counts_the_microbatches_so_far(mesh: dict[str, int]) -> None:
    config = model_config(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1.0)
    data = inputs_of()
    data["cotangent"] = np.zeros_like(data["cotangent"])
    _, weights, _ = block_parts(config)
    router = np.asarray(weights["router"]["weight"], np.float64)
    logits = data["x"] @ router.T
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    live = data["token_weights"] > 0
    expected, counts = 0.0, np.zeros(8)
    for rows in (slice(0, 4), slice(4, 8)):
        chosen = np.argsort(-logits[rows][live[rows]], axis=-1)[:, :2]
        counts += np.bincount(chosen.ravel(), minlength=8)
        share = counts / counts.sum()
        expected += 8 * (p[rows] * share * live[rows][..., None]).sum() / live.sum()
    result = run_block(config, mesh, data=data, microbatches=2)
    np.testing.assert_allclose(result["objective"], expected, rtol=1e-5)


def one_expert(weights: Any) -> Any:
    """Weights whose router sends every token to experts 0 and 1 (the inputs are positive)."""
    router = np.zeros_like(weights["router"]["weight"])
    router[0], router[1] = 2.0, 1.0
    return {**weights, "router": {**weights["router"], "weight": jnp.asarray(router)}}


MESHES: list[dict[str, int]] = [
    {},
    {"expert": 2},
    {"expert": 4},
    {"expert": 2, "tensor": 2},
    {"expert": 4, "tensor": 2},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_idle_experts_have_zero_gradients(mesh: dict[str, int], dispatcher: str) -> None:
    config = model_config(moe_token_dispatcher_type=dispatcher)
    data = inputs_of()
    data["x"] = np.abs(data["x"]) + 0.1
    _, weights, _ = block_parts(config)
    result = run_block(config, mesh, data=data, weights=one_expert(weights))
    live = int((data["token_weights"] > 0).sum())
    assert result["load"].tolist() == [live, live, 0, 0, 0, 0, 0, 0]
    for name in ("up", "down"):
        grads = result["grads"]["experts"][name]
        assert np.all(np.isfinite(grads))
        assert np.all(grads[2:] == 0), "idle experts, and devices with idle experts alone"
        assert np.all(np.any(grads[:2] != 0, axis=tuple(range(1, grads.ndim))))


@pytest.mark.parametrize("mesh", [{}, {"expert": 4}], ids=str)
def test_shards_without_a_live_token_are_nothing_special(mesh: dict[str, int]) -> None:
    data = inputs_of()
    live = np.zeros((8, SEQ), np.float32)
    live[0, :5] = 1  # all on the first data shard
    data["token_weights"] = live / 5
    config = model_config(moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1)
    result = run_block(config, mesh, data=data)
    assert result["load"].sum() == 5 * config.moe_router_topk
    assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves(result))
    assert np.all(result["y"][1:] == 0)
    assert_same(result, run_block(config, data=data))


def test_values_of_padding_tokens_do_not_matter() -> None:
    config = model_config(
        moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1, moe_expert_capacity_factor=0.5
    )
    data = inputs_of()
    other = {**data, "x": data["x"].copy()}
    other["x"][data["token_weights"] == 0] = 1e3
    first, second = run_block(config, data=data), run_block(config, data=other)
    assert_same(second, first, 1e-6)


def test_losses_other_than_of_the_microbatch_do_not_depend_on_the_cut() -> None:
    config = model_config(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.1)
    assert_same(run_block(config, microbatches=4), run_block(config))


def test_jitter_depends_on_the_step_and_not_on_mesh_or_cut() -> None:
    config = model_config(moe_input_jitter_eps=0.3)
    first = run_block(config, step=3)
    assert_same(run_block(config, {"expert": 2, "tensor": 2}, step=3), first)
    assert_same(run_block(config, {"context": 2}, step=3, microbatches=2), first)
    assert not np.allclose(run_block(config, step=4)["y"], first["y"], atol=1e-3)
    assert not np.allclose(run_block(config)["y"], first["y"], atol=1e-3)


def test_forced_balance_gives_every_expert_the_same_load() -> None:
    data = inputs_of()
    data["token_weights"] = np.full((8, SEQ), 1 / (8 * SEQ), np.float32)
    config = model_config(moe_router_force_load_balancing=True)
    result = run_block(config, {"expert": 2, "context": 2}, data=data)
    assert result["load"].tolist() == [8 * SEQ * 2 // 8] * 8
    assert_same(result, run_block(config, data=data))


def test_sinkhorn_balances_skewed_logits() -> None:
    data = inputs_of()
    data["x"] = np.abs(data["x"]) + 0.1  # experts 0 and 1 score highest everywhere
    data["token_weights"] = np.full((8, SEQ), 1 / (8 * SEQ), np.float32)
    config = model_config(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1)
    _, weights, _ = block_parts(config)
    skewed = {**weights, "router": dict(weights["router"])}
    skewed["router"]["weight"] = weights["router"]["weight"].at[0].add(1.0)
    plain = model_config(moe_router_topk=1)
    before = run_block(plain, data=data, weights=skewed)["load"]
    after = run_block(config, data=data, weights=skewed)["load"]
    assert after.max() < before.max() / 1.5


def test_a_router_in_bf16_still_decides_in_fp32() -> None:
    """Two experts whose logits differ by less than bf16 resolves."""
    config = model_config(moe_router_topk=1)
    _, weights, _ = block_parts(config)
    router = np.zeros((8, HIDDEN), np.float32)
    router[3, 0], router[5, 0] = 1.0, 1.0 + 2.0**-12
    weights = {**weights, "router": {**weights["router"], "weight": jnp.asarray(router)}}
    data = inputs_of()
    data["x"] = np.ones_like(data["x"])
    assert run_block(config, data=data, weights=weights)["load"].argmax() == 5
