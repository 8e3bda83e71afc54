"""Tiny training runs: two layers on an indexed corpus that the test writes."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.checkpoint.meta import read_meta
from jaxtron.config.config import Config
from jaxtron.config.load import load_config
from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.mesh.axes import AXES
from jaxtron.program import Program
from jaxtron.trainer import Result, Trainer

VOCAB, SEQ, BATCH = 64, 16, 8

MESHES: dict[str, dict[str, int]] = {
    "1 device": {},
    "fsdp 8": {"fsdp": 8},
    "tensor 8": {"tensor": 8},
    "data 8": {"data": 8},
    "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
}


def write_corpus(folder: Path, documents: int = 60, largest_id: int = VOCAB - 1) -> str:
    """Documents of 5 to 40 tokens that repeat themselves; the prefix of the .bin/.idx pair."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    prefix = folder / "corpus"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            words = rng.integers(0, VOCAB, rng.integers(2, 5))
            document = np.tile(words, 10)[: rng.integers(5, 41)]
            writer.add_document([document])
        writer.add_document([np.full(9, largest_id)])
        writer.finalize()
    return str(prefix)


def raw_config(folder: Path, **sections: Any) -> dict[str, Any]:
    """Six AdamW steps whose learning rate changes in each; sections are merged key by key."""
    raw: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 8,
            "num_query_groups": 2,
            "vocab_size": VOCAB,
            "make_vocab_size_divisible_by": 8,
            "max_position_embeddings": SEQ,
        },
        "parallel": {"fsdp": 1},
        "data": {"paths": [str(folder / "corpus")], "split": "80,20,0", "seq_length": SEQ},
        "train": {"steps": 6, "global_batch_size": BATCH, "num_microbatches": 1},
        "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "lr_warmup_steps": 2, "lr_decay_steps": 6},
        "precision": {"compute": "fp32"},
        "checkpoint": {"dir": str(folder / "checkpoints"), "async_save": False},
        "observe": {"dir": str(folder / "run"), "tensorboard": False, "progress": "off"},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    if not raw["data"]["paths"]:
        del raw["data"]["split"]  # there is nothing to split
    return raw


def make_config(folder: Path, **sections: Any) -> Config:
    """The configuration of :func:`raw_config`; writes the corpus unless it is there."""
    if not (folder / "corpus.idx").exists():
        write_corpus(folder)
    return load_config(raw_config(folder, **sections))


_programs: dict[str, Program] = {}


def make_trainer(config: Config) -> Trainer:
    """A trainer on as many devices as its mesh has; equal programs are compiled once."""
    parallel = config.parallel
    sizes = (getattr(parallel, axis) for axis in AXES)
    trainer = Trainer(config, jax.devices()[: math.prod(sizes)])
    train = dataclasses.replace(config.train, exit_interval=None, exit_duration_min=None)
    if config.optimizer.lr_decay_steps is not None:  # the learning rate does not depend on them
        train = dataclasses.replace(train, steps=0)
    parts = (config.model, parallel, train, config.optimizer, config.precision, config.loss)
    trainer.program = _programs.setdefault(repr(parts), trainer.program)
    return trainer


def train(folder: Path, **sections: Any) -> Result:
    """One launch."""
    return make_trainer(make_config(folder, **sections)).fit()


def records(folder: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The training lines of metrics.jsonl."""
    return [record for record in records(folder) if "eval_loss" not in record]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The evaluation lines of metrics.jsonl."""
    return [record for record in records(folder) if "eval_loss" in record]


def saved_digests(folder: Path, step: int) -> dict[str, str]:
    """Digest of every saved array: equal digests are equal bits (tests/checkpoint)."""
    arrays = read_meta(folder / "checkpoints" / str(step)).arrays
    return {name: record.digest for name, record in arrays.items()}


def saved_state(folder: Path, trainer: Trainer, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, gathered."""
    reader = Checkpointer(CheckpointConfig(dir=str(folder / "checkpoints")))
    state, _ = reader.restore(step, trainer.program.abstract_state())
    return gathered(state)


def gathered(state: Any) -> dict[str, np.ndarray]:
    """Leaves by name as host arrays."""
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def assert_bitwise(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Same names, dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        other = actual[name]
        assert (other.dtype, other.shape) == (array.dtype, array.shape), name
        assert other.tobytes() == array.tobytes(), name
