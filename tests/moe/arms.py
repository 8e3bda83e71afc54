"""Arms of parity over the ``expert`` axis; also runs some by name, for more than eight devices.

``python -m tests.moe.arms NAME ...`` with enough fake devices in ``XLA_FLAGS``.
"""

import itertools
import math
import sys
from typing import Any

import jax
import numpy as np

from jaxtron.mesh.axes import AXES
from tests.moe.ragged import ragged_exchange_written_out
from tests.parity.harness import assert_parity, reference, run

T_MOE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 8,
    "max_position_embeddings": 16,
    "init_method_std": 0.1,
    "num_experts": 8,
    "moe_ffn_hidden_size": 16,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
    "moe_per_layer_logging": True,
}
DISPATCHERS = {
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "ragged": {"moe_token_dispatcher_type": "ragged"},
}
CAPACITIES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "capacity": {"moe_expert_capacity_factor": 1.0},
}
# As DeepSeek-V3 routes: sigmoid scores, a bias that balances, a shared expert.
BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "moe_shared_expert_intermediate_size": 16,
}
# As DeepSeek-V2: latent attention, a dense first layer, softmax before the choice.
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "num_layers": 3,
    "moe_layer_freq": [0, 1, 1],
    "moe_router_pre_softmax": True,
    "moe_shared_expert_intermediate_size": 16,
}
EVERY_SECOND = {"num_layers": 4, "moe_layer_freq": 2}
AHEAD = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
WHOLE_EXPERTS = {"experts": ["expert", "tensor"], "expert_mlp": None}

LARGE: dict[str, dict[str, Any]] = {
    "tensor2-pipeline2-context2-expert2": {
        "parallel": {"tensor": 2, "pipeline": 2, "context": 2, "expert": 2},
        "model": BIAS,
    },
    "tensor2-pipeline2-expert2-fsdp2": {
        "parallel": {
            "tensor": 2,
            "pipeline": 2,
            "expert": 2,
            "fsdp": 2,
            "data_sharding": "optim_grads",
        },
        "model": BIAS,
    },
}
"""Arms on 16 devices."""

ALTERNATING: dict[str, dict[str, Any]] = {
    "context2-capacity": {
        "parallel": {"expert": 2, "context": 2},
        "model": EVERY_SECOND | CAPACITIES["capacity"],
    },
    "fsdp2-tensor2": {
        "parallel": {"expert": 2, "fsdp": 2, "tensor": 2, "data_sharding": "optim_grads"},
        "model": EVERY_SECOND | DISPATCHERS["allgather"],
    },
    "two-chunks-a-stage": {
        "parallel": {
            "expert": 2,
            "pipeline": 2,
            "virtual_pipeline": 2,
            "pipeline_schedule": "interleaved",
        },
        "model": EVERY_SECOND | AHEAD | {"num_layers": 8},
    },
    "never-repeats": {
        "parallel": {"expert": 4},
        "model": BIAS | {"num_layers": 4, "moe_layer_freq": [1, 1, 0, 1]},
        "train": {"num_microbatches": 2, "recompute": {"mlp_up": "recompute"}},
    },
}
"""Layers with and without experts by turns."""


def product() -> dict[str, dict[str, Any]]:
    """{2, 4, 8} x dispatchers x {alone, tensor, fsdp, pipeline, context 2} x capacities."""
    others = ({}, {"tensor": 2}, {"fsdp": 2}, {"pipeline": 2}, {"context": 2})
    arms = {}
    for expert, dispatcher, other, capacity in itertools.product(
        (2, 4, 8), DISPATCHERS, others, CAPACITIES
    ):
        rest = [f"{axis}{size}" for axis, size in other.items()]
        name = "-".join([f"expert{expert}", *rest, dispatcher, capacity])
        arms[name] = {
            "parallel": {"expert": expert, **other},
            "model": {**DISPATCHERS[dispatcher], **CAPACITIES[capacity]},
        }
    return arms


def devices_of(parallel: dict[str, Any]) -> int:
    """Devices that a layout takes."""
    return math.prod(parallel.get(axis, 1) for axis in AXES)


def check_arm(parallel: dict[str, Any], model: dict[str, Any], **raw: Any) -> None:
    """PARITY of a layout with one device, loads and router losses included."""
    raw = {"model": {**T_MOE, **model}, "train": {"num_microbatches": 2}, **raw}
    # the reference knows no dispatcher: all of them equal one device without any
    plain = {k: v for k, v in raw["model"].items() if k != "moe_token_dispatcher_type"}
    devices = jax.devices()[: devices_of(parallel)]
    with ragged_exchange_written_out():
        actual = run(parallel, devices, **raw)
    expected = reference(**{**raw, "model": plain})
    assert_parity(actual, expected)
    for a, e in zip(actual["metrics"], expected["metrics"], strict=True):
        assert set(a) == set(e)
        for name in [name for name in e if name.startswith(("moe_", "mtp_"))]:
            np.testing.assert_allclose(a[name], e[name], rtol=1e-5)


if __name__ == "__main__":
    arms = {**product(), **LARGE}
    for name in sys.argv[1:]:
        check_arm(**arms[name])
        print(name, "equals one device", flush=True)
