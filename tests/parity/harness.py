"""Parity between a mesh and one device: the central test of the project.

An arm builds the same model from the same seed on some mesh, runs the same global batches and
compares loss, every gradient leaf, gradient norm and the state after three SGD steps with a run on
one device. SGD, because Adam hides a constant factor on gradients.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxtron.config.load import load_config
from jaxtron.program import Program

# T-DENSE of the acceptance cases
MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "vocab_size": 100,
    "make_vocab_size_divisible_by": 8,
    "max_position_embeddings": 16,
}
SEQ, BATCH = 16, 32


def make_config(model: dict | None = None, parallel: dict | None = None, **sections: dict) -> Any:
    """A T-DENSE training configuration with overrides per section."""
    raw = {
        "model": {**MODEL, **(model or {})},
        "parallel": {"fsdp": 1, **(parallel or {})},
        "data": {"source": "synthetic", "seq_length": SEQ, **sections.pop("data", {})},
        "train": {
            "steps": 3,
            "global_batch_size": BATCH,
            "num_microbatches": 1,
            "layer_loop": "scan",
            **sections.pop("train", {}),
        },
        "optimizer": {
            "name": "sgd",
            "sgd_momentum": 0.0,
            "lr": 0.1,
            "min_lr": 0.1,
            "lr_decay_style": "constant",
            "weight_decay": 0.0,
            "clip_grad": 0.0,
            **sections.pop("optimizer", {}),
        },
        "precision": {"compute": "fp32", **sections.pop("precision", {})},
        **sections,
    }
    return load_config(raw, [])


def make_batch(config: Any, step: int = 0, ragged: bool = True) -> dict[str, np.ndarray]:
    """Random rows; ``ragged`` masks a different share of each row, one row wholly."""
    rng = np.random.default_rng(100 + step)
    shape = (config.train.global_batch_size, config.data.seq_length)
    tokens = rng.integers(0, config.model.vocab_size, shape, dtype=np.int32)
    labels = rng.integers(0, config.model.vocab_size, shape, dtype=np.int32)
    mask = np.ones(shape, np.float32)
    if ragged:
        mask = (rng.random(shape) < rng.random((shape[0], 1))).astype(np.float32)
        if shape[0] > 1:  # a row alone keeps its tokens
            mask[1] = 0
    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    if config.data.reset_attention_mask:
        cuts = rng.random(shape) < 0.2
        batch["segment_ids"] = np.cumsum(cuts, axis=1).astype(np.int32)
    if config.data.reset_position_ids:
        start = np.maximum.accumulate(
            np.where(rng.random(shape) < 0.2, np.arange(shape[1]), 0), axis=1
        )
        batch["position_ids"] = (np.arange(shape[1]) - start).astype(np.int32)
    return batch


def rows_of(program: Program, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The batch on the program's devices."""
    return program.place({k: v[program.placement.rows] for k, v in batch.items()})


def drawn_state(program: Program) -> Any:
    """As ``program.init_state()``, with the code generator that runs outside of tests.

    The one that tests have on JAX 0.10 (tests/conftest.py) may round the normal distribution's
    last bit otherwise in a vector's rest, and so differ from mesh to mesh.
    """
    old = tuple(int(n) for n in jax.__version__.split(".")[:2]) < (0, 11)
    init = jax.jit(
        program._init_state,
        out_shardings=program.state_shardings,
        compiler_options={"xla_cpu_use_fusion_emitters": True} if old else None,
    )
    return init(program.config.train.seed)


@functools.lru_cache(maxsize=4)
def _initial_state(model: str, optimizer: str) -> Any:
    config = make_config(model=json.loads(model), optimizer=json.loads(optimizer))
    return jax.tree.map(np.asarray, Program(config, jax.devices()[:1]).init_state())


def initial_state(program: Program) -> Any:
    """The same saved weights for every mesh, put on the program's devices."""
    model = dataclasses.asdict(program.config.model)
    optimizer = dataclasses.asdict(program.config.optimizer)
    saved = _initial_state(json.dumps(model), json.dumps(optimizer))
    abstract = program.abstract_state()
    placed = jax.tree.map(lambda a, s: jax.device_put(a, s.sharding), saved, abstract)
    return program.from_logical(placed)


def run(parallel: dict, devices: Sequence[jax.Device], steps: int = 3, **raw: dict) -> dict:
    """Loss and gradients of the first batch, metrics of each step, and the final parameters.

    The optimizer has momentum: what it holds after one step is the first batch's gradient as the
    optimizer got it, to the bit, without a second program that would compute it.
    """
    raw = {**raw, "optimizer": {"sgd_momentum": 0.5, **raw.get("optimizer", {})}}
    program = Program(make_config(parallel=parallel, **raw), devices)
    state = initial_state(program)
    result: dict[str, Any] = {"metrics": []}
    for step in range(steps):
        state, metrics = program.train_step(
            state, rows_of(program, make_batch(program.config, step))
        )
        assert_replicas_equal(state)
        result["metrics"].append(jax.tree.map(float, metrics))
        logical = program.to_logical({name: state[name] for name in ("params", "opt_state")})
        if step == 0:
            grads = optax.tree.get(logical["opt_state"], "trace")
            result["grads"] = jax.tree.map(np.asarray, grads)
    result["params"] = jax.tree.map(np.asarray, logical["params"])
    return result


@functools.lru_cache(maxsize=32)
def _reference(key: str) -> dict[str, Any]:
    return run({}, jax.devices()[:1], **json.loads(key))


def reference(**raw: dict) -> dict[str, Any]:
    """The one-device run of a configuration, computed once per process."""
    raw.pop("parallel", None)
    return _reference(json.dumps(raw, sort_keys=True))


def assert_replicas_equal(tree: Any) -> None:
    """Every device's copy of every shard is bit-identical to the others that hold it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        seen: dict[Any, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            key = str(shard.index)
            if key in seen and not np.array_equal(seen[key], data, equal_nan=True):
                raise AssertionError(f"replicas differ: {jax.tree_util.keystr(path)} {key}")
            seen.setdefault(key, data)


def assert_close_leaves(actual: Any, expected: Any, tolerance: float, what: str) -> None:
    """max|a - e| / max|e| of every leaf is at most ``tolerance``."""
    flat = jax.tree_util.tree_leaves_with_path(expected)
    assert len(flat) == len(jax.tree.leaves(actual))
    for (path, e), a in zip(flat, jax.tree.leaves(actual), strict=True):
        scale = np.max(np.abs(e))
        error = np.max(np.abs(a - e)) / (scale if scale > 0 else 1.0)
        assert error <= tolerance, f"{what} {jax.tree_util.keystr(path)}: {error:.2e}"


def assert_parity(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """PARITY of the acceptance cases."""
    assert_close_leaves(actual["grads"], expected["grads"], 2e-5, "gradient")
    for a, e in zip(actual["metrics"], expected["metrics"], strict=True):
        assert a["tokens"] == e["tokens"]
        np.testing.assert_allclose(a["loss"], e["loss"], rtol=1e-6)
        np.testing.assert_allclose(a["grad_norm"], e["grad_norm"], rtol=1e-5)
    assert_close_leaves(actual["params"], expected["params"], 2e-5, "parameter")
