"""The MoE block with its experts on two GPUs against one GPU, by every dispatcher.

Run with ``pytest -m gpu tests/gpu/test_dispatch_on_gpus.py``. The ragged exchange exists on GPUs
alone; elsewhere tests write it out.
"""

from typing import Any

import jax
import pytest

from jaxtron.layers.moe.layer import DISPATCHERS
from tests.moe.block import assert_same, model_config, run_block

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("capacity", [None, 1.0], ids=["dropless", "capacity"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_experts_on_two_gpus_equal_one(dispatcher: str, capacity: float | None) -> None:
    if len(jax.devices("gpu")) < 2:
        pytest.skip("needs 2 GPUs")
    changes: dict[str, Any] = {"moe_expert_capacity_factor": capacity, "moe_aux_loss_coeff": 0.3}
    with jax.default_matmul_precision("highest"):  # else fp32 products are rounded to TF32
        expected = run_block(model_config(**changes))
        actual = run_block(
            model_config(moe_token_dispatcher_type=dispatcher, **changes), {"expert": 2}
        )
    assert_same(actual, expected, 1e-4)
