"""Configurations drawn at random: what is not refused trains as on one device.

The products of the other tests take two or three choices at a time. Here all are drawn together, by
numbered draws, so that one that fails can be run again.
"""

import math
import random
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxtron.errors import ConfigError
from jaxtron.program import Program
from tests.parity.harness import assert_parity, make_config, reference, run
from tests.parity.pipeline_arms import SCHEDULES

EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_aux_loss_coeff": 0.05,
}
PACKED = {"eod_token": 0, "reset_attention_mask": True, "reset_position_ids": True}
# Of each group one entry: the first most often.
CHOICES: list[list[dict[str, dict[str, Any]]]] = [
    [
        {},
        *[{"parallel": {"data_sharding": s}} for s in ("optim_grads", "optim_grads_params")],
        {"parallel": {"data_sharding": "no_shard"}},
    ],
    [{}, *[{"parallel": SCHEDULES[name]} for name in ("gpipe", "interleaved")]],
    [{}, {"parallel": {"tp_comm_overlap": True}}, {"parallel": {"sequence_parallel": False}}],
    [
        {},
        *[{"parallel": {"context_strategy": s}} for s in ("ring", "all_to_all")],
        {"parallel": {"context_cut_documents": 4}},
    ],
    [{}, {"parallel": {"overlap_grad_reduce": True, "overlap_param_gather": True}}],
    [{}, {"parallel": {"rules": {"expert_mlp": None}}}, {"parallel": {"rules": {"vocab": None}}}],
    [
        {},
        {"train": {"recompute": "full"}},
        {"train": {"recompute": {"mlp_up": "recompute", "attention_norm": "recompute"}}},
    ],
    [{"train": {"layer_loop": "unroll"}}, {"train": {"layer_loop": "scan"}}],
    [{}, {"train": {"microbatches_at_once": 2}}],
    [{}, {"data": PACKED}],
    [{}, {"model": {"hidden_dropout": 0.1}}, {"model": {"window_size": 5}}],
    [{}, {"model": {"untie_embeddings_and_output_weights": False}}],
    [{}, {"model": {"mtp_num_layers": 1}}],
    [{}, {"model": {"num_query_groups": 8}}],
    [{}, {"loss": {"chunk_tokens": 7}}],
    [{}, {"optimizer": {"clip_grad": 0.05}}],
]
CHOICES_OF_EXPERTS: list[list[dict[str, dict[str, Any]]]] = [
    [
        {"model": {"moe_token_dispatcher_type": "allgather"}},
        {"model": {"moe_token_dispatcher_type": "alltoall"}},
    ],
    [{}, {"model": {"moe_expert_capacity_factor": 1.0}}],
    [{}, {"model": {"moe_shared_expert_intermediate_size": 16}}],
    [{}, {"model": {"moe_layer_freq": 2}}],
    [{}, {"model": {"moe_router_load_balancing_type": "seq_aux_loss"}}],
]
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


def draws(number: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Configurations, most of them with choices that do not go together."""
    rng = random.Random(number)
    while True:
        experts = rng.random() < 0.4
        sizes = dict.fromkeys(AXES, 1)
        for _ in range(rng.choice((2, 3, 3))):
            sizes[rng.choice([axis for axis in AXES if experts or axis != "expert"])] *= 2
        count = rng.choice((2, 3, 4))
        raw: dict[str, dict[str, Any]] = {
            "model": {**(EXPERTS if experts else {}), "num_layers": 4},
            "parallel": dict(sizes),
            "train": {"num_microbatches": count, "global_batch_size": 8 * count},
        }
        for group in CHOICES + (CHOICES_OF_EXPERTS if experts else []):
            chosen = group[0] if rng.random() < 0.6 else rng.choice(group)
            for section, values in chosen.items():
                raw.setdefault(section, {}).update(values)
        yield raw


def accepted(number: int) -> dict[str, dict[str, Any]]:
    """The first configuration of a number of draws that is not refused."""
    for raw in draws(number):
        sizes = [raw["parallel"][axis] for axis in AXES]
        try:
            Program(make_config(**raw), jax.devices()[: math.prod(sizes)])
        except ConfigError:
            continue
        return raw
    raise AssertionError


def check(number: int) -> None:
    raw = accepted(number)
    print(f"draw {number}: {raw}")  # shown if it fails
    parallel = raw.pop("parallel")
    devices = jax.devices()[: math.prod(parallel[axis] for axis in AXES)]
    # choices of a mesh alone, without which one device computes the same
    one = {**raw, "train": {**raw["train"], "microbatches_at_once": 1}}
    assert_parity(run(parallel, devices, **raw), reference(**one))


@pytest.mark.parametrize("number", range(4))
def test_a_random_configuration_equals_one_device(number: int) -> None:
    check(number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4, 64))
def test_more_random_configurations_equal_one_device(number: int) -> None:
    check(number)
