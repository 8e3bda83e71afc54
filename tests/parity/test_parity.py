"""Loss, gradients, norms and next state on every mesh equal those on one device (O08, O09, O10)."""

import itertools
from typing import Any

import jax
import pytest

from tests.parity.harness import assert_parity, reference, run

LAYOUTS: dict[str, dict[str, Any]] = {
    "data8": {"data": 8},
    "fsdp8-no_shard": {"fsdp": 8, "data_sharding": "no_shard"},
    "fsdp8-optim": {"fsdp": 8, "data_sharding": "optim"},
    "fsdp8-optim_grads": {"fsdp": 8, "data_sharding": "optim_grads"},
    "fsdp8-optim_grads_params": {"fsdp": 8, "data_sharding": "optim_grads_params"},
    "tensor2": {"tensor": 2},
    "tensor4": {"tensor": 4},
    "tensor8": {"tensor": 8},
    "tensor2-nosp": {"tensor": 2, "sequence_parallel": False},
    "tensor4-nosp": {"tensor": 4, "sequence_parallel": False},
    "tensor8-nosp": {"tensor": 8, "sequence_parallel": False},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}
MICROBATCHES = (1, 4)
TIED = (False, True)
GROUPS = {"gqa": 2, "mha": 8}

# One arm per layout, and among them every pair of the other factors.
DEFAULT = [
    ("data8", 4, True, "mha"),
    ("fsdp8-no_shard", 1, False, "mha"),
    ("fsdp8-optim", 4, False, "gqa"),
    ("fsdp8-optim_grads", 4, True, "gqa"),
    ("fsdp8-optim_grads_params", 4, False, "gqa"),
    ("tensor2", 1, True, "gqa"),
    ("tensor4", 4, False, "mha"),
    ("tensor8", 1, False, "gqa"),
    ("tensor2-nosp", 4, False, "gqa"),
    ("tensor4-nosp", 1, True, "gqa"),
    ("tensor8-nosp", 1, False, "mha"),
    ("data2-fsdp2-tensor2", 4, True, "gqa"),
]


def devices_of(parallel: dict[str, Any]) -> list[jax.Device]:
    count = 1
    for axis in ("data", "fsdp", "tensor", "pipeline", "context"):
        count *= parallel.get(axis, 1)
    return jax.devices()[:count]


def check(parallel: dict[str, Any], **raw: Any) -> None:
    assert_parity(run(parallel, devices_of(parallel), **raw), reference(**raw))


def check_arm(layout: str, microbatches: int, tied: bool, groups: str) -> None:
    check(
        LAYOUTS[layout],
        model={
            "untie_embeddings_and_output_weights": not tied,
            "num_query_groups": GROUPS[groups],
        },
        train={"num_microbatches": microbatches},
    )


@pytest.mark.parametrize(("layout", "microbatches", "tied", "groups"), DEFAULT)
def test_mesh_equals_one_device(layout: str, microbatches: int, tied: bool, groups: str) -> None:
    check_arm(layout, microbatches, tied, groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "microbatches", "tied", "groups"),
    sorted(set(itertools.product(LAYOUTS, MICROBATCHES, TIED, GROUPS)) - set(DEFAULT)),
)
def test_full_product_equals_one_device(
    layout: str, microbatches: int, tied: bool, groups: str
) -> None:
    check_arm(layout, microbatches, tied, groups)


GPT2 = {
    "normalization": "LayerNorm",
    "activation": "gelu_tanh",
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
    "num_query_groups": 8,
}


def test_gpt2_style_model_on_a_three_axis_mesh() -> None:
    check(
        {"data": 2, "fsdp": 2, "tensor": 2, "data_sharding": "optim_grads"},
        model=GPT2,
        train={"num_microbatches": 2, "layer_loop": "unroll"},
    )


def test_qk_norm_qkv_bias_and_window_with_zero3_and_recompute() -> None:
    check(
        {"fsdp": 2, "tensor": 4, "data_sharding": "optim_grads_params"},
        model={"qk_layernorm": True, "add_qkv_bias": True, "window_size": 5},
        train={"num_microbatches": 2, "layer_loop": "unroll", "recompute": "full"},
    )


def test_microbatch_mean_z_loss_and_small_chunks() -> None:
    check(
        {"data": 2, "tensor": 2, "sequence_parallel": False},
        train={"num_microbatches": 4, "recompute": "selective"},
        loss={"reduction": "microbatch", "z_loss_coeff": 0.01, "chunk_tokens": 7},
    )


def test_packed_documents_with_reset_positions() -> None:
    check(
        {"fsdp": 2, "tensor": 2},
        data={
            "source": "synthetic",
            "seq_length": 16,
            "eod_token": 0,
            "reset_attention_mask": True,
            "reset_position_ids": True,
        },
        train={"num_microbatches": 2},
    )


def test_dropout_does_not_depend_on_the_mesh() -> None:
    raw = {
        "model": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
        "train": {"num_microbatches": 2},
    }
    for parallel in ({"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}):
        check(parallel, **raw)


def test_dropout_does_not_depend_on_the_microbatch_cut() -> None:
    model = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
    one = reference(model=model, train={"num_microbatches": 1})
    assert_parity(reference(model=model, train={"num_microbatches": 8}), one)


@pytest.mark.parametrize("microbatches", [2, 8])
def test_token_mean_does_not_depend_on_the_microbatch_cut(microbatches: int) -> None:
    one = reference(train={"num_microbatches": 1})
    assert_parity(reference(train={"num_microbatches": microbatches}), one)


@pytest.mark.parametrize(
    ("rules", "model"),
    [
        ({"heads": None, "kv_heads": None}, {"num_attention_heads": 3, "num_query_groups": 3}),
        ({"mlp": None}, {"ffn_hidden_size": 45}),
        ({"vocab": None}, {"vocab_size": 101, "make_vocab_size_divisible_by": 1}),
    ],
    ids=["heads", "mlp", "vocab"],
)
def test_what_the_rules_leave_whole_need_not_divide(
    rules: dict[str, None], model: dict[str, int]
) -> None:
    check({"tensor": 2, "rules": rules}, model={"num_layers": 1, "kv_channels": 8, **model})


def test_a_width_that_no_layer_has_need_not_divide() -> None:
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 16, "ffn_hidden_size": 45}
    check({"tensor": 2}, model={"num_layers": 1, **experts})
