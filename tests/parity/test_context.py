"""A sequence split over ``context`` trains as on one device, by every strategy (O07, O09, O19)."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.program import Program
from tests.parity.context_arms import FOUR_AXES, HEADS, PACKED, check_arm, devices_of, product
from tests.parity.harness import (
    assert_close_leaves,
    initial_state,
    make_batch,
    make_config,
    rows_of,
)

STRATEGIES: dict[str, dict[str, Any]] = {
    "all_gather": {},
    "ring": {},
    "all_to_all": {},
    "hierarchical": {"context_all_to_all": 2},
}

# Among these: every strategy with every axis that it goes with (all_gather with fsdp and pipeline
# in FOUR_AXES), every strategy alone with the most devices that the product has it on, every size,
# packed, cut and plain rows, grouped heads, sliding window, norms of queries and keys, dropout,
# learned positions, every level of data sharding, every kind of recomputation, both layer loops.
# Eight members beside another axis take 16 devices; they are in the full product.
DEFAULT: dict[str, dict[str, Any]] = {
    "ring2-grouped": {
        "parallel": {"context": 2, "context_strategy": "ring"},
        "train": {"num_microbatches": 4},
    },
    "all_gather4-tensor2-cut-documents": {
        "parallel": {
            "context": 4,
            "tensor": 2,
            "data_sharding": "no_shard",
            "context_cut_documents": 3,
        },
        "data": PACKED,
        "train": {"num_microbatches": 2, "recompute": "selective"},
    },
    "all_to_all2-fsdp2-packed-zero3": {
        "parallel": {
            "context": 2,
            "context_strategy": "all_to_all",
            "fsdp": 2,
            "data_sharding": "optim_grads_params",
        },
        "data": PACKED,
        "train": {"num_microbatches": 2, "recompute": {"core_attn": "recompute"}},
    },
    "hierarchical4-data2-dropout": {
        "parallel": {
            "context": 4,
            "context_strategy": "hierarchical",
            "context_all_to_all": 2,
            "data": 2,
        },
        "model": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
    },
    "ring8-packed-window-norms": {
        "parallel": {"context": 8, "context_strategy": "ring"},
        "model": {"window_size": 5, "qk_layernorm": True},
        "data": PACKED,
        "train": {"recompute": "full"},
    },
    "all_gather2-data2-learned-positions-window": {
        "parallel": {"context": 2, "data": 2},
        "model": {
            "window_size": 3,
            "position_embedding_type": "learned_absolute",
            "untie_embeddings_and_output_weights": False,
            "attention_dropout": 0.2,
        },
        "train": {"num_microbatches": 2, "layer_loop": "unroll"},
    },
    "all_to_all4-tensor2-no-sequence-parallel": {
        "parallel": {
            "context": 4,
            "context_strategy": "all_to_all",
            "tensor": 2,
            "sequence_parallel": False,
        },
        "model": {**HEADS, "attention_dropout": 0.3},
    },
    "ring2-fsdp2-tensor2-zero3": {
        "parallel": {
            "context": 2,
            "context_strategy": "ring",
            "fsdp": 2,
            "tensor": 2,
            "data_sharding": "optim_grads_params",
        },
        "model": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
        "train": {"num_microbatches": 2, "recompute": {"core_attn": "save"}},
        "loss": {"reduction": "microbatch", "z_loss_coeff": 0.01},
    },
    "ring4-data2-packed": {
        "parallel": {"context": 4, "context_strategy": "ring", "data": 2},
        "data": PACKED,
        "train": {"num_microbatches": 2},
    },
    "all_gather8": {"parallel": {"context": 8}, "model": {"qk_layernorm": True}},
    "all_to_all8-packed": {
        "parallel": {"context": 8, "context_strategy": "all_to_all"},
        "model": HEADS,
        "data": PACKED,
    },
    "all_to_all2-data2-pipeline2": {
        "parallel": {
            "context": 2,
            "context_strategy": "all_to_all",
            "data": 2,
            "pipeline": 2,
        },
        "train": {"num_microbatches": 4},
    },
    "hierarchical8-packed": {
        "parallel": {"context": 8, "context_strategy": "hierarchical", "context_all_to_all": 2},
        "data": PACKED,
        "train": {"num_microbatches": 2},
    },
    "hierarchical4-tensor2-packed": {
        "parallel": {
            "context": 4,
            "context_strategy": "hierarchical",
            "context_all_to_all": 2,
            "tensor": 2,
        },
        "model": HEADS,
        "data": PACKED,
    },
    "hierarchical4-fsdp2-scattered-gradients": {
        "parallel": {
            "context": 4,
            "context_strategy": "hierarchical",
            "context_all_to_all": 2,
            "fsdp": 2,
            "data_sharding": "optim_grads",
        },
        "train": {"num_microbatches": 2},
    },
}


@pytest.mark.parametrize("arm", DEFAULT)
def test_context_parallel_training_equals_one_device(arm: str) -> None:
    check_arm(**DEFAULT[arm])


def _fits(name: str, devices: int) -> bool:
    return devices_of(product()[name]["parallel"]) <= devices


@pytest.mark.slow
@pytest.mark.parametrize("arm", [name for name in product() if _fits(name, 8)])
def test_full_product_equals_one_device(arm: str) -> None:
    check_arm(**product()[arm])


@pytest.mark.slow
@pytest.mark.parametrize("arm", [name for name in product() if not _fits(name, 8)])
def test_sixteen_devices_equal_one(arm: str) -> None:
    _check_on_sixteen_devices(arm)


@pytest.mark.parametrize("arm", FOUR_AXES)
def test_four_axes_at_once_equal_one_device(arm: str) -> None:
    _check_on_sixteen_devices(arm)


def _check_on_sixteen_devices(arm: str) -> None:
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=16")
    subprocess.run(
        [sys.executable, "-m", "tests.parity.context_arms", arm],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=600,
    )


# -- odd batches -------------------------------------------------------------------------------


BESIDE = {"all_gather": "tensor", "ring": "fsdp", "all_to_all": "tensor", "hierarchical": "data"}


def _config(strategy: str | None, packed: bool = False) -> Any:
    """Plain rows on four members of ``context`` alone, packed ones beside another axis."""
    parallel: dict[str, Any] = {}
    if strategy is not None:
        parallel = {"context": 4, "context_strategy": strategy, **STRATEGIES[strategy]}
        parallel |= {BESIDE[strategy]: 2} if packed else {}
    data = PACKED if packed else {}
    return make_config(model={**HEADS, "num_layers": 2}, parallel=parallel, data=data)


@functools.cache
def _program(strategy: str | None, packed: bool = False) -> tuple[Program, Any, Any]:
    devices = 1 if strategy is None else 8 if packed else 4
    program = Program(_config(strategy, packed), jax.devices()[:devices])
    return program, jax.jit(program.loss_and_gradients), initial_state(program)["params"]


def _loss(
    strategy: str | None, batch: dict[str, np.ndarray], packed: bool = False
) -> tuple[float, int, Any]:
    program, function, params = _program(strategy, packed)
    loss, tokens, grads = function(params, rows_of(program, batch))
    return float(loss), int(tokens), jax.tree.map(np.asarray, grads)


def _masked(case: str, packed: bool = False) -> dict[str, np.ndarray]:
    batch = make_batch(_config(None, packed), ragged=False)
    mask = np.zeros_like(batch["loss_mask"])
    if case == "shards without any valid token":
        mask[:, 1:2] = 1  # member 0's first chunk of 4 members
    elif case == "a single valid token":
        mask[5, 9] = 1
    elif case == "odd real lengths, padded":
        lengths = 1 + 2 * (np.arange(len(mask)) % 8)
        mask[np.arange(mask.shape[1]) < lengths[:, None]] = 1
    return {**batch, "loss_mask": mask}


CASES = [
    "shards without any valid token",
    "a single valid token",
    "odd real lengths, padded",
    "no valid token",
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed beside another axis"])
@pytest.mark.parametrize("case", CASES)
def test_sparse_loss_masks_equal_one_device(case: str, packed: bool, strategy: str) -> None:
    batch = _masked(case, packed)
    loss, tokens, grads = _loss(strategy, batch, packed)
    want_loss, want_tokens, want_grads = _loss(None, batch, packed)
    assert tokens == want_tokens == int(batch["loss_mask"].sum())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_close_leaves(grads, want_grads, 2e-5, "gradient")
    if case == "no valid token":
        assert loss == 0
        assert all(not np.any(g) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed beside another axis"])
def test_pad_ids_change_nothing(packed: bool, strategy: str) -> None:
    batch = _masked("odd real lengths, padded", packed)
    padding = batch["loss_mask"] == 0
    other = {name: np.where(padding, 7, batch[name]) for name in ("tokens", "labels")}
    assert np.any(other["tokens"] != batch["tokens"])
    before, after = (_loss(strategy, rows, packed) for rows in (batch, {**batch, **other}))
    assert before[0] == after[0]
    for a, b in zip(jax.tree.leaves(before[2]), jax.tree.leaves(after[2]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_token_changes_the_last_logits_as_on_one_device(strategy: str) -> None:
    tokens = make_batch(_config(None))["tokens"][:2].copy()
    tokens[1] = tokens[0]
    tokens[1, 0] = (tokens[0, 0] + 1) % 100
    for last in (15, 6):
        results = {}
        for name in (strategy, None):
            program, _, params = _program(name)
            results[name] = np.asarray(
                program.next_token_logits(params, tokens, np.full(2, last, np.int32))
            )
        np.testing.assert_allclose(results[strategy], results[None], rtol=1e-4, atol=1e-6)
        difference = np.abs(results[strategy][0] - results[strategy][1]).max()
        expected = np.abs(results[None][0] - results[None][1]).max()
        assert expected > 1e-5
        np.testing.assert_allclose(difference, expected, rtol=1e-2)
