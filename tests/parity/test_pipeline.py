"""Pipelines: loss, gradients, norms and next state equal those of one device (O10, O13)."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.parallel.pipeline.stack_order import is_stacked
from jaxtron.program import Program
from tests.parity.context_arms import devices_of
from tests.parity.harness import (
    assert_close_leaves,
    drawn_state,
    initial_state,
    make_batch,
    make_config,
    rows_of,
)
from tests.parity.pipeline_arms import ARMS, SCHEDULES, Arm, check_arm, parallel_of
from tests.parity.test_parity import GPT2, check


def devices_of_arm(arm: Arm) -> int:
    return devices_of(parallel_of(*arm[:3]))


DEFAULT: list[Arm] = [
    (2, "1f1b", "alone", "4p"),
    (2, "1f1b", "data2", "odd"),
    (2, "1f1b", "data2-tensor2", "odd"),
    (2, "gpipe", "tensor2", "odd"),
    (2, "gpipe", "fsdp2", "odd"),
    (2, "gpipe", "data2", "4p"),
    (2, "gpipe", "data2-tensor2", "4p"),
    (2, "interleaved", "tensor2", "4p"),
    (2, "interleaved", "fsdp2", "p"),
    (2, "interleaved", "data2-tensor2", "p"),
    (4, "1f1b", "tensor2", "p"),
    (4, "1f1b", "fsdp2", "4p"),
    (4, "gpipe", "alone", "odd"),
    (4, "interleaved", "data2", "p"),
    (8, "1f1b", "alone", "odd"),
    (8, "gpipe", "alone", "4p"),
    (8, "interleaved", "alone", "p"),
    # of 16 and 32 devices
    (4, "gpipe", "data2-tensor2", "p"),
    (8, "gpipe", "tensor2", "p"),
    (8, "interleaved", "fsdp2", "p"),
    (8, "1f1b", "data2", "p"),
    (8, "1f1b", "data2-tensor2", "p"),
]
"""Every pair of two choices that the product has (:func:`test_default_arms_have_every_pair`)."""
REST = sorted(set(ARMS) - set(DEFAULT))


def test_default_arms_have_every_pair() -> None:
    def pairs(arms: list[Arm]) -> set[Any]:
        return {pair for arm in arms for pair in itertools.combinations(enumerate(arm), 2)}

    assert pairs(DEFAULT) == pairs(ARMS)


@pytest.mark.parametrize(("stages", "schedule", "other", "count"), DEFAULT)
def test_pipeline_equals_one_device(stages: int, schedule: str, other: str, count: str) -> None:
    arm = stages, schedule, other, count
    if devices_of_arm(arm) <= 8:
        check_arm(*arm)
    else:
        check_in_a_process(devices_of_arm(arm), [arm])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "schedule", "other", "count"), [arm for arm in REST if devices_of_arm(arm) <= 8]
)
def test_full_product_equals_one_device(stages: int, schedule: str, other: str, count: str) -> None:
    check_arm(stages, schedule, other, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "stages", "schedule", "count"),
    sorted({(devices_of_arm(arm), *arm[:2], arm[3]) for arm in REST if devices_of_arm(arm) > 8}),
)
def test_more_than_eight_devices_equal_one(
    devices: int, stages: int, schedule: str, count: str
) -> None:
    group = devices, stages, schedule, count
    arms = [arm for arm in REST if (devices_of_arm(arm), *arm[:2], arm[3]) == group]
    check_in_a_process(devices, arms)


def check_in_a_process(devices: int, arms: list[Arm]) -> None:
    """PARITY of arms, in a process that has as many devices."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    names = ["-".join(map(str, arm)) for arm in arms]
    subprocess.run(
        [sys.executable, "-m", "tests.parity.pipeline_arms", *names],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=1200,
    )


def test_uneven_stages_with_scattered_gradients_and_unrolled_layers() -> None:
    """Stages of 1, 3, 2 and 0 layers; the padding of the state is never counted."""
    check(
        {
            "pipeline": 4,
            "fsdp": 2,
            "pipeline_layout": "Et|ttt|tt|L",
            "data_sharding": "optim_grads",
        },
        model={"num_layers": 6},
        train={"num_microbatches": 5, "global_batch_size": 10, "layer_loop": "unroll"},
        optimizer={"clip_grad": 0.05},
    )


def test_uneven_chunks_with_scanned_layers() -> None:
    check(
        {
            "pipeline": 2,
            "virtual_pipeline": 2,
            "pipeline_schedule": "interleaved",
            "pipeline_layout": "Et|ttt||ttL",
        },
        model={"num_layers": 6},
        train={"num_microbatches": 4, "global_batch_size": 8},
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 2, "tensor": 2, "data": 2},
        {"pipeline": 2, "fsdp": 2, "data_sharding": "no_shard", **SCHEDULES["interleaved"]},
    ],
    ids=["1f1b", "interleaved, no_shard"],
)
def test_gpt2_style_model_with_tied_embeddings(parallel: dict[str, Any]) -> None:
    check(
        parallel,
        model={**GPT2, "num_layers": 4},
        train={"num_microbatches": 4, "layer_loop": "unroll"},
    )


@pytest.mark.parametrize(
    "train",
    [
        {"recompute": "full"},
        {"recompute": "selective", "layer_loop": "unroll"},
        {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute": {"mlp_up": "recompute"}, "layer_loop": "unroll"},
    ],
    ids=["full", "selective", "block", "by name"],
)
def test_recomputation_and_dropout_inside_stages(train: dict[str, Any]) -> None:
    check(
        {"pipeline": 2, "tensor": 2, "virtual_pipeline": 2, "pipeline_schedule": "interleaved"},
        model={"num_layers": 8, "hidden_dropout": 0.2, "attention_dropout": 0.2},
        train={"num_microbatches": 4, "global_batch_size": 8, **train},
    )


def test_a_vocabulary_that_is_not_spread_over_the_stages() -> None:
    check(
        {"pipeline": 2, "tensor": 2, "rules": {"vocab": "tensor"}},
        train={"num_microbatches": 3, "global_batch_size": 6},
    )


def test_packed_documents_with_reset_positions() -> None:
    check(
        {"pipeline": 2, "fsdp": 2},
        data={
            "source": "synthetic",
            "seq_length": 16,
            "eod_token": 0,
            "reset_attention_mask": True,
            "reset_position_ids": True,
        },
        train={"num_microbatches": 4},
        loss={"z_loss_coeff": 0.01, "chunk_tokens": 7},
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_evaluation_and_generation_equal_one_device(schedule: str) -> None:
    raw: dict[str, Any] = {
        "model": {"num_layers": 4},
        "train": {"num_microbatches": 4, "global_batch_size": 8},
    }
    parallel = {"pipeline": 2, "tensor": 2, **SCHEDULES[schedule]}
    results = []
    for config, devices in (
        (make_config(**raw), 1),
        (make_config(parallel=parallel, **raw), 4),
    ):
        program = Program(config, jax.devices()[:devices])
        params = initial_state(program)["params"]
        batch = make_batch(config)
        loss, tokens = program.eval_step(params, rows_of(program, batch))
        last = np.array([3, 9], np.int32)
        logits = program.next_token_logits(params, batch["tokens"][:2], last)
        results.append((float(loss), int(tokens), np.asarray(logits)))
    (loss, tokens, logits), (loss_p, tokens_p, logits_p) = results
    assert tokens_p == tokens
    np.testing.assert_allclose(loss_p, loss, rtol=1e-6)
    np.testing.assert_allclose(logits_p, logits, rtol=1e-5, atol=1e-6)


def test_empty_slots_stay_zero_under_adamw() -> None:
    """Stages of 2 and 1 layers; the second has an empty slot, in weights, moments and gradients."""
    config = make_config(
        model={"num_layers": 3},
        parallel={"pipeline": 2, "pipeline_layout": "Ett|tL"},
        train={"num_microbatches": 2, "global_batch_size": 4},
        optimizer={"name": "adamw", "lr": 1e-2, "min_lr": 1e-2, "weight_decay": 0.1},
    )
    program = Program(config, jax.devices()[:2])
    state, metrics = program.train_step(
        initial_state(program), rows_of(program, make_batch(config))
    )
    assert float(metrics["grad_norm"]) > 0
    stacked = [
        (path, np.asarray(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if is_stacked(path, leaf, 4)
    ]
    assert len(stacked) == 3 * len(jax.tree.leaves(state["params"]["layers"]))
    for path, leaf in stacked:
        name = jax.tree_util.keystr(path)
        assert not leaf[3].any(), name
        assert all(leaf[i].any() for i in range(3)), name


def test_adafactors_moments_follow_their_layers() -> None:
    """Per-matrix moments, of several matrices a layer too, go to stages in another order."""
    raw: dict[str, Any] = {
        "model": {"num_layers": 3, "num_experts": 4, "moe_ffn_hidden_size": 16},
        "train": {"num_microbatches": 2, "global_batch_size": 4},
        "optimizer": {"name": "adafactor", "adafactor_min_dim_size_to_factor": 8},
    }
    parallel = {
        "pipeline": 2,
        "pipeline_schedule": "interleaved",
        "virtual_pipeline": 2,
        "pipeline_layout": "E|t|tt|L",
    }
    one = Program(make_config(**raw), jax.devices()[:1])
    staged = Program(make_config(parallel=parallel, **raw), jax.devices()[:2])
    after_one, _ = one.train_step(initial_state(one), rows_of(one, make_batch(one.config)))
    saved = jax.tree.map(np.asarray, after_one)
    placed = jax.tree.map(
        lambda a, s: jax.device_put(a, s.sharding), saved, staged.abstract_state()
    )
    batch = make_batch(one.config, 1)
    expected, _ = one.train_step(after_one, rows_of(one, batch))
    actual, _ = staged.train_step(staged.from_logical(placed), rows_of(staged, batch))
    actual = staged.to_logical(actual)
    for name in ("params", "opt_state"):
        trees = (jax.tree.map(np.asarray, state[name]) for state in (actual, expected))
        assert_close_leaves(*trees, 1e-4, name)


@pytest.mark.parametrize(
    ("parallel", "devices"),
    [
        ({"pipeline": 4, "fsdp": 2, "pipeline_layout": "Et|ttt|tt|L"}, 8),
        (
            {"pipeline": 2, "tensor": 2, "virtual_pipeline": 3, "pipeline_schedule": "interleaved"},
            4,
        ),
    ],
    ids=["uneven", "interleaved"],
)
def test_initial_weights_do_not_depend_on_the_stages(
    parallel: dict[str, Any], devices: int
) -> None:
    """Bitwise; and there and back between the two orders of the layers nothing changes."""
    raw: dict[str, Any] = {
        "model": {"num_layers": 6},
        "train": {"num_microbatches": 8, "global_batch_size": 16},
    }
    one = drawn_state(Program(make_config(**raw), jax.devices()[:1]))["params"]
    program = Program(make_config(parallel=parallel, **raw), jax.devices()[:devices])
    logical = program.to_logical({"params": drawn_state(program)["params"]})
    again = program.to_logical(program.from_logical(logical))
    for params in (logical["params"], again["params"]):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), params, one
        )
