"""Training with experts on a mesh equals one device: loss, gradients, norms, loads, next state."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.moe.arms import (
    AHEAD,
    ALTERNATING,
    BIAS,
    CAPACITIES,
    DISPATCHERS,
    EVERY_SECOND,
    LARGE,
    LATENT,
    WHOLE_EXPERTS,
    check_arm,
    devices_of,
    product,
)

ALLGATHER, CAPACITY = DISPATCHERS["allgather"], CAPACITIES["capacity"]
DROPOUT = {"hidden_dropout": 0.3, "attention_dropout": 0.3}

DEFAULT: dict[str, dict[str, Any]] = {
    "expert8": {"parallel": {"expert": 8}, "model": CAPACITY},
    "expert2-zero3": {
        "parallel": {"expert": 2, "fsdp": 2, "data_sharding": "optim_grads_params"},
        "model": ALLGATHER | CAPACITY,
    },
    "every-second-layer-expert2-tensor2-zero3": {
        "parallel": {"expert": 2, "tensor": 2, "data_sharding": "optim_grads_params"},
        "model": {
            **EVERY_SECOND,
            "moe_layer_freq": [0, 1, 0, 1],
            "moe_router_load_balancing_type": "global_aux_loss",
        },
    },
    "expert2-data2-tensor2": {
        "parallel": {"expert": 2, "data": 2, "tensor": 2},
        "model": BIAS | DROPOUT,
    },
    "expert2-fsdp2-tensor2-whole-experts": {
        "parallel": {
            "expert": 2,
            "fsdp": 2,
            "tensor": 2,
            "data_sharding": "no_shard",
            "rules": WHOLE_EXPERTS,
        },
        "model": CAPACITY,
    },
    "expert2-pipeline2": {
        "parallel": {"expert": 2, "pipeline": 2},
        "model": BIAS | ALLGATHER | AHEAD | DROPOUT,
    },
    "dense-first-expert4-pipeline2-global": {
        "parallel": {"expert": 4, "pipeline": 2},
        "model": LATENT | {"moe_router_load_balancing_type": "global_aux_loss"},
    },
    "every-second-layer-expert2-pipeline2": {
        "parallel": {"expert": 2, "pipeline": 2},
        "model": EVERY_SECOND | BIAS | DROPOUT,
        "train": {"num_microbatches": 2, "recompute": "full"},
    },
    "expert2-context2": {"parallel": {"expert": 2, "context": 2}, "model": CAPACITY | AHEAD},
    "latent-expert2-fsdp2-tensor2-zero3": {
        "parallel": {"expert": 2, "fsdp": 2, "tensor": 2, "data_sharding": "optim_grads_params"},
        # projections from latents divide by 2 data shards, and not by 4
        "model": LATENT | AHEAD | {"q_lora_rank": 18, "kv_lora_rank": 18, "qk_head_dim": 6},
    },
}


@pytest.mark.parametrize("arm", DEFAULT)
def test_mesh_equals_one_device(arm: str) -> None:
    check_arm(**DEFAULT[arm])


def _in_a_process(arms: Sequence[str], devices: int) -> None:
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    subprocess.run(
        [sys.executable, "-m", "tests.moe.arms", *arms],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=900,
    )


@pytest.mark.slow
@pytest.mark.parametrize("arm", product())
def test_full_product_equals_one_device(arm: str) -> None:
    devices = devices_of(product()[arm]["parallel"])
    if devices <= 8:
        check_arm(**product()[arm])
    else:
        _in_a_process([arm], devices)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ALTERNATING)
def test_alternating_layers_equal_one_device(arm: str) -> None:
    check_arm(**ALTERNATING[arm])


def test_four_axes_at_once() -> None:
    """In one process, which computes what both are compared with once."""
    _in_a_process(list(LARGE), 16)
