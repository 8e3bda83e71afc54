"""The MoE block on every layout equals one device: output, losses, load, every gradient."""

import functools
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from jaxtron.log_once import log_once
from tests.moe.block import assert_same, model_config, run_block
from tests.moe.ragged import ragged_exchange_written_out

LAYOUTS: dict[str, dict[str, Any]] = {
    "expert2": {"mesh": {"expert": 2}},
    "expert8": {"mesh": {"expert": 8}},
    "data2-fsdp2-expert2": {"mesh": {"data": 2, "fsdp": 2, "expert": 2}},
    "tensor2": {"mesh": {"tensor": 2}},
    "tensor2-expert4": {"mesh": {"expert": 4, "tensor": 2}},
    "tensor2-expert2-nosp": {"mesh": {"expert": 2, "tensor": 2}, "sp": False},
    "context2-expert2": {"mesh": {"expert": 2, "context": 2}},
    "experts-over-expert-tensor": {
        "mesh": {"expert": 2, "tensor": 2},
        "rules": {"experts": ["expert", "tensor"], "expert_mlp": None},
    },
    "experts-over-expert-tensor-nosp": {
        "mesh": {"expert": 2, "tensor": 2},
        "rules": {"experts": ["expert", "tensor"], "expert_mlp": None},
        "sp": False,
    },
    "experts-over-expert-context": {
        "mesh": {"expert": 2, "context": 2, "fsdp": 2},
        "rules": {"experts": ["expert", "context"]},
    },
    "experts-whole-on-tensor": {"mesh": {"expert": 2, "tensor": 2}, "rules": {"expert_mlp": None}},
}
CAPACITIES = {
    "dropless": {},
    "probs": {"moe_expert_capacity_factor": 1.0},
    "position": {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
}
BALANCE = {
    "seq_aux_loss": {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1},
    "aux_loss": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": 0.1,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_aux_loss_coeff": 0.3,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
}
SHARED = {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True}


@pytest.fixture(autouse=True)
def ragged_exchange_on_cpus() -> Iterator[None]:
    with ragged_exchange_written_out():
        yield


@functools.lru_cache
def reference(changes: str) -> dict[str, Any]:
    return run_block(model_config(**json.loads(changes)))


def check(layout: str, dispatcher: str, **changes: Any) -> None:
    arm = LAYOUTS[layout]
    expected = reference(json.dumps(changes, sort_keys=True))
    config = model_config(moe_token_dispatcher_type=dispatcher, **changes)
    actual = run_block(
        config, arm["mesh"], rules=arm.get("rules"), sequence_parallel=arm.get("sp", True)
    )
    assert_same(actual, expected)


@pytest.mark.parametrize(
    ("layout", "dispatcher", "capacity", "balance"),
    [
        ("expert8", "allgather", "probs", "aux_loss"),
        ("expert8", "ragged", "dropless", "seq_aux_loss"),
        ("data2-fsdp2-expert2", "ragged", "position", "aux_loss"),
        ("tensor2-expert4", "alltoall", "probs", "seq_aux_loss"),
        ("tensor2-expert2-nosp", "allgather", "dropless", "bias"),
        ("context2-expert2", "alltoall", "probs", "seq_aux_loss"),
        ("experts-over-expert-tensor", "alltoall", "dropless", "seq_aux_loss"),
        ("experts-over-expert-context", "allgather", "dropless", "sinkhorn"),
        ("expert8", "auto", "probs", "seq_aux_loss"),
    ],
)
def test_mesh_equals_one_device(layout: str, dispatcher: str, capacity: str, balance: str) -> None:
    check(layout, dispatcher, **CAPACITIES[capacity], **BALANCE[balance], **SHARED)


@pytest.mark.parametrize(
    ("layout", "capacity", "chosen"),
    [
        (
            "expert8",
            None,
            "allgather",
        ),  # a token chooses 2 of 8 experts, so that a device may get it
        ("tensor2-expert4", None, "allgather"),  # or get it twice
        ("expert8", 1.0, "alltoall"),  # 4 of 16 tokens at most
        ("data2-fsdp2-expert2", 1.0, "allgather"),  # 4 of each of 4 experts
        ("data2-fsdp2-expert2", 0.5, "alltoall"),
    ],
)
def test_auto_takes_the_dispatcher_that_sends_less(
    layout: str, capacity: float | None, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    config = model_config(moe_token_dispatcher_type="auto", moe_expert_capacity_factor=capacity)
    with caplog.at_level(logging.INFO):
        run_block(config, LAYOUTS[layout]["mesh"])
    assert f"dispatcher: {chosen} (auto)" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("balance", BALANCE)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "ragged"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_product_equals_one_device(
    layout: str, dispatcher: str, capacity: str, balance: str
) -> None:
    check(layout, dispatcher, **CAPACITIES[capacity], **BALANCE[balance], **SHARED)
