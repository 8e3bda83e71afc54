"""Training with experts equals ``transformers`` in PyTorch, balance of the experts included.

Mixtral, Qwen3-MoE, and DeepSeek-V3 with its dense first layer, latent attention with YaRN, groups
of experts, shared expert and bias.
"""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxtron.config.load import load_config
from jaxtron.layers.moe.expert_bias import join_buffers, split_buffers
from jaxtron.program import Program
from tests.reference.expert_models import SEQ, Balance, build, our_keys, to_tree
from tests.reference.test_same_training_as_pytorch import assert_close
from tests.reference.torch_run import Batch, Plan, TorchRun, train

ROWS, MICROBATCHES = 8, 4
PLAN = Plan(steps=4, warmup=1, clip=2.0)


@functools.cache
def batches(vocab_size: int = 101) -> list[Batch]:
    """Random rows; some end in padding, one is nothing else, and prompts are masked."""
    rng = np.random.default_rng(3)
    out = []
    for _ in range(PLAN.steps):
        text = rng.integers(0, vocab_size, (ROWS, SEQ + 1), dtype=np.int32)
        place = np.arange(SEQ)
        mask = (place >= rng.integers(0, 8, (ROWS, 1))) & (place < rng.integers(20, 40, (ROWS, 1)))
        mask[1] = False
        out.append(
            {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask.astype(np.float32)}
        )
    return out


def live(batch: Batch) -> np.ndarray:
    """Tokens with a valid label at their place or behind it."""
    return np.flip(np.maximum.accumulate(np.flip(batch["loss_mask"] > 0, 1), 1), 1).copy()


@functools.cache
def torch_run(family: str) -> tuple[TorchRun, list[float], list[np.ndarray]]:
    """The run, what routers added to the objective in each step, and the biases before each."""
    model = build(family)
    balance = Balance(model, our_keys(family))
    added: list[float] = []
    biases: list[np.ndarray] = []
    has_bias = our_keys(family).get("moe_router_enable_expert_bias", False)

    def start(batch: Batch) -> None:
        if added:
            balance.end()
        if has_bias:
            biases.append(balance.biases())
        balance.start(live(batch))
        added.append(0.0)

    def losses(part: Batch) -> Any:
        loss = balance.losses(live(part))
        added[-1] += float(loss.detach())
        return loss

    run = train(model, batches(), MICROBATCHES, PLAN, start=start, added=losses)
    return run, added, biases


def make_program(family: str, parallel: dict[str, Any]) -> Program:
    config = load_config(
        {
            "model": {
                **our_keys(family),
                "make_vocab_size_divisible_by": 8,
                "max_position_embeddings": SEQ,
            },
            "parallel": {"fsdp": 1, **parallel},
            "data": {"source": "synthetic", "seq_length": SEQ},
            "train": {
                "steps": PLAN.steps,
                "global_batch_size": ROWS,
                "num_microbatches": MICROBATCHES,
                "layer_loop": "scan",
            },
            "optimizer": PLAN.adamw(),
            "precision": {"compute": "fp32"},
        },
        [],
    )
    return Program(config, jax.devices()[: int(np.prod(list(parallel.values())))])


@pytest.mark.parametrize(
    ("family", "parallel"),
    [("mixtral", {}), ("qwen3_moe", {}), ("deepseek_v3", {"expert": 2, "tensor": 2})],
)
def test_training_equals_pytorch(family: str, parallel: dict[str, Any]) -> None:
    program = make_program(family, parallel)
    config = program.config.model
    expected, added, biases = torch_run(family)
    shapes = program.abstract_state()
    values = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    _, buffers = split_buffers(values["params"])
    buffers = jax.tree.map(lambda _: biases[0], buffers)
    values["params"] = join_buffers(to_tree(expected.initial, config), buffers)
    state = jax.tree.map(lambda leaf, v: jax.device_put(v, leaf.sharding), shapes, values)
    history = []
    for number, batch in enumerate(batches()):
        for bias in jax.tree.leaves(split_buffers(state["params"])[1]):
            np.testing.assert_allclose(bias, biases[number], atol=1e-6)
        state, metrics = program.train_step(state, program.place(batch))
        history.append({name: float(value) for name, value in metrics.items()})
        if number == 0:
            moments = optax.tree_utils.tree_get(state["opt_state"], "mu")
            assert_close(
                moments, to_tree(expected.first_moments, config), 1e-4, "first moments after a step"
            )
    for name, numbers, tolerance in (
        ("loss", expected.losses, 1e-5),
        ("moe_aux_loss", added, 1e-4),
        ("grad_norm", expected.grad_norms, 1e-4),
    ):
        ours = [metrics[name] for metrics in history]
        np.testing.assert_allclose(ours, numbers, rtol=tolerance, err_msg=name)
    trained, _ = split_buffers(state["params"])
    assert_close(trained, to_tree(expected.final, config), 1e-3, "weights after training")
