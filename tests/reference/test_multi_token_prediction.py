"""Losses and gradients of multi-token prediction against the same written in PyTorch.

Layers, embedding and norms are those of a ``transformers`` Llama; shifting the targets, joining
hidden states and embeddings and weighing the losses are written out here.
"""

from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.config.load import load_config
from jaxtron.program import Program
from tests.reference.models import MODELS
from tests.reference.torch_run import build
from tests.reference.weights import to_params

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROWS, SEQ, DEPTHS, FACTOR = 4, 24, 2, 0.3


def make_program(depths: int, **data: Any) -> Program:
    raw = {
        "model": {
            **MODELS["llama"],
            "make_vocab_size_divisible_by": 8,
            "max_position_embeddings": 32,
            "mtp_num_layers": depths,
            "mtp_loss_scaling_factor": FACTOR,
        },
        "data": {"source": "synthetic", "seq_length": SEQ, **data},
        "train": {"steps": 2, "global_batch_size": ROWS},
        "optimizer": {"name": "sgd", "lr": 0.1, "min_lr": 0.1, "lr_warmup_steps": 0},
        "precision": {"compute": "fp32"},
    }
    return Program(load_config(raw, []), jax.devices()[:1])


class Ahead(torch.nn.Module):
    """One depth: ``norm(layer(W_e norm(e) + W_h norm(h)))``."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.embedding_norm = LlamaRMSNorm(size, epsilon)
        self.hidden_norm = LlamaRMSNorm(size, epsilon)
        self.final_norm = LlamaRMSNorm(size, epsilon)
        self.projection = torch.nn.Linear(2 * size, size, bias=False)
        self.layer = LlamaDecoderLayer(config, index)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.06)

    def forward(self, hidden: Any, embedded: Any, **inputs: Any) -> Any:
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1)
        out = self.layer(self.projection(both), **inputs)
        return self.final_norm(out[0] if isinstance(out, tuple) else out)


def torch_losses(
    model: Any, depths: Any, batch: dict[str, np.ndarray], cross_documents: bool
) -> list[Any]:
    """Mean cross-entropy of the model and of every depth; position by position for the shifts."""
    tokens = torch.from_numpy(batch["tokens"]).long()
    labels = torch.from_numpy(batch["labels"]).long()
    mask = torch.from_numpy(batch["loss_mask"])
    segments = batch.get("segment_ids", np.zeros((ROWS, SEQ), np.int32))
    positions = torch.arange(SEQ)[None]
    seen = torch.from_numpy(segments[:, :, None] == segments[:, None, :])
    seen &= torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    floor = torch.finfo(torch.float32).min
    attention = torch.zeros(ROWS, 1, SEQ, SEQ).masked_fill(~seen[:, None], floor)
    hidden = model.model(
        input_ids=tokens, attention_mask=attention, position_ids=positions, use_cache=False
    ).last_hidden_state
    rotary = model.model.rotary_emb(hidden, positions)

    def mean_loss(hidden: Any, labels: Any, mask: Any) -> Any:
        nll = torch.nn.functional.cross_entropy(
            model.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="none"
        )
        return (nll * mask.flatten()).sum() / mask.sum()

    losses = [mean_loss(hidden, labels, mask)]
    for k, depth in enumerate(depths, start=1):
        further, targets = torch.zeros_like(tokens), torch.zeros_like(labels)
        counted = torch.zeros_like(mask)
        for row in range(ROWS):
            for i in range(SEQ - k):
                further[row, i] = tokens[row, i + k]
                targets[row, i] = labels[row, i + k]
                if cross_documents or segments[row, i] == segments[row, i + k]:
                    counted[row, i] = mask[row, i + k]
        hidden = depth(
            hidden,
            model.model.embed_tokens(further),
            attention_mask=attention,
            position_ids=positions,
            position_embeddings=rotary,
        )
        losses.append(mean_loss(hidden, targets, counted))
    return losses


def tree(model: Any, depths: Any, config: Any, read: Any) -> dict[str, Any]:
    """Weights or gradients of the PyTorch modules as a tree like the program's parameters."""
    tensors = {name: read(p) for name, p in model.named_parameters()}
    params = to_params("llama", tensors, config)
    for i, depth in enumerate(depths):
        # the map knows whole models: the depth's layer stands for each of one's layers
        layer = {f"model.layers.{j}.{n}": read(p) for n, p in depth.layer.named_parameters()
                 for j in range(config.num_layers)}  # fmt: skip
        stacked = to_params("llama", {**tensors, **layer}, config)["layers"]
        size = config.hidden_size
        params[f"mtp_{i}"] = {
            **{
                name: {"weight": read(getattr(depth, name).weight)}
                for name in ("embedding_norm", "hidden_norm", "final_norm")
            },
            "projection": read(depth.projection.weight).T.reshape(2, size, size),
            "layer": jax.tree.map(lambda a: a[0], stacked),
        }
    return params


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_losses_and_gradients_equal_pytorch(packed: bool) -> None:
    program = make_program(DEPTHS, reset_attention_mask=packed, eod_token=0)
    config = program.config.model
    model = build("llama")
    torch.manual_seed(1)
    depths = torch.nn.ModuleList(Ahead(model.config, i) for i in range(DEPTHS))
    rng = np.random.default_rng(0)
    shape = (ROWS, SEQ)
    batch = {
        "tokens": rng.integers(0, config.vocab_size, shape, dtype=np.int32),
        "labels": rng.integers(0, config.vocab_size, shape, dtype=np.int32),
        "loss_mask": (rng.random(shape) < 0.7).astype(np.float32),
    }
    if packed:
        batch["segment_ids"] = np.cumsum(rng.random(shape) < 0.2, axis=1).astype(np.int32)
    losses = torch_losses(model, depths, batch, cross_documents=not packed)
    (losses[0] + FACTOR * sum(losses[1:]) / DEPTHS).backward()

    params = tree(model, depths, config, lambda p: p.detach().numpy())
    expected = tree(model, depths, config, lambda p: p.grad.numpy())
    initial = program.init_state()["params"]
    assert jax.tree.map(np.shape, initial) == jax.tree.map(np.shape, params)
    result = jax.jit(program._with_report)(params, program.place(batch), 0, 1.0)
    np.testing.assert_allclose(float(result[0]), float(losses[0].detach()), rtol=1e-5)
    for entry, loss in zip(result[5], losses[1:], strict=True):
        np.testing.assert_allclose(float(entry["loss"]), float(loss.detach()), rtol=1e-5)
    flat = jax.tree_util.tree_leaves_with_path(expected)
    for (path, e), a in zip(flat, jax.tree.leaves(result[2]), strict=True):
        error = np.max(np.abs(np.asarray(a) - e)) / np.max(np.abs(e))
        assert error < 2e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def test_metrics_name_every_depth() -> None:
    program = make_program(DEPTHS)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 101, (ROWS, SEQ + 1), dtype=np.int32)
    mask = np.ones((ROWS, SEQ), np.float32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}
    _, metrics = program.train_step(program.init_state(), program.place(batch))
    assert {"mtp_1_loss", "mtp_2_loss"} <= set(metrics)
    np.testing.assert_allclose(float(metrics["mtp_1_loss"]), np.log(101), rtol=0.05)
