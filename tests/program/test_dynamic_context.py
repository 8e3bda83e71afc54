"""Dynamic context parallelism: what it computes is what one device computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.dynamic_program import DynamicProgram
from jaxtron.parallel.context.dynamic import dynamic_context
from jaxtron.program import Program
from tests.moe.arms import BIAS, T_MOE
from tests.parity.harness import assert_close_leaves, initial_state, make_config

SEQ, ROWS = 32, 8
PACKED = {
    "seq_length": SEQ,
    "eod_token": 0,
    "reset_attention_mask": True,
    "reset_position_ids": True,
}
ARMS: dict[str, dict[str, Any]] = {
    "ring 4, tensor 2, cut documents": {
        "parallel": {
            "context": 4,
            "context_strategy": "ring",
            "tensor": 2,
            "context_cut_documents": 5,
        }
    },
    "all_to_all 2, data 2, fsdp 2": {
        "parallel": {
            "context": 2,
            "context_strategy": "all_to_all",
            "data": 2,
            "fsdp": 2,
            "data_sharding": "optim_grads_params",
        },
        "train": {"microbatches_at_once": 2},
    },
    "all_gather 2, expert 2": {
        "parallel": {"context": 2, "expert": 2, "data": 2},
        "model": {**T_MOE, **BIAS, "moe_aux_loss_coeff": 0.0, "vocab_size": 100},
    },
}
SLOW: dict[str, dict[str, Any]] = {
    "ring 8": {"parallel": {"context": 8, "context_strategy": "ring"}},
    "hierarchical 4, fsdp 2": {
        "parallel": {
            "context": 4,
            "context_strategy": "hierarchical",
            "context_all_to_all": 2,
            "fsdp": 2,
            "data_sharding": "optim_grads",
            "max_seqlen_per_dp_cp_rank": 12,
        },
        "model": {"num_query_groups": 8, "window_size": 9},
    },
    "ring 4, expert 2": {
        "parallel": {"context": 4, "context_strategy": "ring", "expert": 2},
        "model": {**T_MOE, **BIAS, "moe_aux_loss_coeff": 0.0, "vocab_size": 100},
    },
}


def config_of(arm: str, dynamic: bool) -> Any:
    raw = (ARMS | SLOW)[arm]
    parallel = {**raw["parallel"], "dynamic_context": True} if dynamic else {}
    model = {**raw.get("model", {}), "max_position_embeddings": SEQ}
    model["num_layers"] = 2 if arm in SLOW else 1
    return make_config(
        model=model,
        parallel=parallel,
        data=PACKED,
        train={
            "global_batch_size": ROWS,
            "num_microbatches": None,
            **(raw.get("train", {}) if dynamic else {}),
        },
    )


def packed_batch(seed: int, lengths: tuple[int, int] = (1, SEQ)) -> dict[str, np.ndarray]:
    """Rows of documents of random lengths, some of their tokens without loss, and padding."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, SEQ)
    batch = {
        "tokens": rng.integers(0, 100, shape, dtype=np.int32),
        "labels": rng.integers(0, 100, shape, dtype=np.int32),
        "loss_mask": (rng.random(shape) < 0.7).astype(np.float32),
        "position_ids": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
    }
    for row in range(ROWS):
        start = number = 0
        while start < SEQ:
            length = min(int(rng.integers(*lengths, endpoint=True)), SEQ - start)
            batch["segment_ids"][row, start : start + length] = number
            batch["position_ids"][row, start : start + length] = np.arange(length)
            start, number = start + length, number + 1
        batch["loss_mask"][row, SEQ - row :] = 0
    return batch


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The compilations of a ``with`` block."""
    found: list[str] = []

    def listener(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.parametrize("arm", [*ARMS, *(pytest.param(a, marks=pytest.mark.slow) for a in SLOW)])
def test_loss_and_gradients_of_any_cut_equal_one_device_and_nothing_compiles_twice(
    arm: str,
) -> None:
    one = Program(config_of(arm, dynamic=False), jax.devices()[:1])
    config = config_of(arm, dynamic=True)
    program = Program(config)
    stage = dynamic_context(config, program.sizes)
    assert stage is not None
    dynamic = DynamicProgram(program, stage)
    state, alone = initial_state(program), initial_state(one)
    with compilations() as compiled:
        dynamic.compile()
    assert 0 < len(compiled) <= 8
    loss_and_gradients = jax.jit(one.loss_and_gradients)
    batches = [packed_batch(0), packed_batch(1, (1, 5)), packed_batch(2, (SEQ, SEQ))]
    used = set()
    with compilations() as compiled:
        steps = [dynamic.place(stage(batch)) for batch in batches]
        totals = []
        for step in steps:
            used |= {call.entry for call in step}
            totals.append(jax.device_get(dynamic.gradients(state, step)[:3]))
    assert not compiled
    assert {stage.menu[0].degree, stage.context} <= {entry.degree for entry in used}
    for batch, (loss, tokens, grads) in zip(batches, totals, strict=True):
        want_loss, want_tokens, want = loss_and_gradients(alone["params"], one.place(batch))
        assert tokens == want_tokens == batch["loss_mask"].sum()
        np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
        assert_close_leaves(grads, jax.tree.map(np.asarray, want), 2e-5, "gradient")
    # and the steps that follow from them
    for batch, step in zip(batches, steps, strict=True):
        state, metrics = dynamic.train_step(state, step)
        alone, expected = one.train_step(alone, one.place(batch))
        for name in ("grad_norm", "real_tokens", "causal_keys", "full_keys"):
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    params = jax.tree.map(np.asarray, (state["params"], alone["params"]))
    assert_close_leaves(*params, 2e-5, "parameter")


def test_a_step_without_a_trained_token_changes_nothing() -> None:
    config = config_of("all_to_all 2, data 2, fsdp 2", dynamic=True)
    program = Program(config)
    stage = dynamic_context(config, program.sizes)
    assert stage is not None
    dynamic = DynamicProgram(program, stage)
    batch = packed_batch(0)
    batch["loss_mask"][:] = 0
    state = initial_state(program)
    before = jax.tree.map(np.asarray, state["params"])
    state, metrics = dynamic.train_step(state, dynamic.place(stage(batch)))
    assert (metrics["loss"], metrics["tokens"], metrics["skipped"]) == (0, 0, 1)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state["params"]))
