"""Training in plain PyTorch: the models of ``transformers``, AdamW, one process, fp32.

Nothing of jaxtron is used here. The learning-rate formula, the document mask and the loss are
written out again, so that an error in ours cannot hide in a shared helper.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Threads that wait for each other cost more than these sizes take: 30 s -> 1.5 s for a run beside
# another process.
torch.set_num_threads(1)

Batch = dict[str, np.ndarray]

# Sizes that differ from each other, so that a wrong transpose does not fit. In the Llama
# heads x head_dim is not the hidden size, and both vocabularies need padding. Weights are larger
# than usual: with small ones every activation function is nearly a line.
LLAMA = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
}
GPT2 = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_inner": 80,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "initializer_range": 0.06,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class Plan:
    """Hyperparameters of a run; lengths in optimizer steps."""

    steps: int = 50
    lr: float = 6e-3
    min_lr: float = 6e-4
    warmup: int = 5
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    # A key's bias changes nothing (softmax does not see what all keys share), so its gradient is
    # rounding error, about 1e-9. With eps 1e-8 Adam would make a random walk of it.
    eps: float = 1e-6
    clip: float = 1.6

    def adamw(self) -> dict[str, str | float]:
        """The section ``optimizer`` of a configuration."""
        return {
            "name": "adamw",
            "lr": self.lr,
            "min_lr": self.min_lr,
            "lr_decay_style": "cosine",
            "lr_warmup_steps": self.warmup,
            "weight_decay": self.weight_decay,
            "adam_beta1": self.betas[0],
            "adam_beta2": self.betas[1],
            "adam_eps": self.eps,
            "clip_grad": self.clip,
        }

    def lr_factor(self, update: int) -> float:
        """Learning rate of an update (from 0) as a share of ``lr``: warm-up, then half a cosine."""
        if update <= self.warmup:
            return update / self.warmup
        progress = (update - self.warmup) / (self.steps - self.warmup)
        floor = self.min_lr / self.lr
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class TorchRun:
    """What a run leaves behind; tensors under their names in the model.

    Attributes:
        initial: weights before the first update.
        logits: ``[rows, seq, vocab]`` of the first batch before the first update.
        first_moments: Adam's after the first update: the clipped gradient times ``1 - beta1``.
        losses, grad_norms, learning_rates: of every step; norms before clipping.
        final: weights after the last update.
    """

    initial: dict[str, np.ndarray]
    logits: np.ndarray
    first_moments: dict[str, np.ndarray]
    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    final: dict[str, np.ndarray]


def build(family: str, seed: int = 0) -> Any:
    """A tiny ``llama`` or ``gpt2`` with random weights.

    Norm weights and biases are moved off 1 and 0: at these values a swapped or forgotten one would
    go unseen.
    """
    torch.manual_seed(seed)
    if family == "llama":
        config = transformers.LlamaConfig(**LLAMA, attn_implementation="eager")
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(**GPT2, attn_implementation="eager")
        model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.train()


def train(
    model: Any,
    batches: Sequence[Batch],
    microbatches: int,
    plan: Plan,
    start: Callable[[Batch], None] = lambda _: None,
    added: Callable[[Batch], Any] = lambda _: 0.0,
) -> TorchRun:
    """One update a batch; the loss is the mean over all valid tokens of the batch.

    ``start`` is called with every batch, and ``added`` with every part of it: what it returns is
    added to the objective, not to the loss.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=plan.lr, betas=plan.betas, eps=plan.eps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, plan.lr_factor)
    initial = snapshot(model)
    with torch.no_grad():
        logits = forward(model, batches[0]).numpy()
    first_moments: dict[str, np.ndarray] = {}
    losses, norms, rates = [], [], []
    for batch in batches:
        optimizer.zero_grad()
        start(batch)
        losses.append(_backward(model, batch, microbatches, added))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)))
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        if not first_moments:
            first_moments = {
                name: optimizer.state[p]["exp_avg"].numpy().copy()
                for name, p in model.named_parameters()
            }
    return TorchRun(initial, logits, first_moments, losses, norms, rates, snapshot(model))


def snapshot(model: Any) -> dict[str, np.ndarray]:
    """Copies of the parameters; a tied one appears once."""
    return {n: p.detach().numpy().copy() for n, p in model.named_parameters()}


def forward(model: Any, batch: Batch) -> Any:
    """Logits ``[rows, seq, vocab]``: attention within a document, positions as the batch says."""
    tokens = torch.from_numpy(batch["tokens"]).long()
    rows, length = tokens.shape
    segments = torch.from_numpy(batch.get("segment_ids", np.zeros((rows, length), np.int32)))
    default = np.broadcast_to(np.arange(length), (rows, length)).copy()
    positions = torch.from_numpy(batch.get("position_ids", default)).long()
    seen = segments[:, :, None] == segments[:, None, :]
    seen &= torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros(rows, 1, length, length).masked_fill(
        ~seen[:, None], torch.finfo(torch.float32).min
    )
    return model(
        input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False
    ).logits


def _backward(model: Any, batch: Batch, microbatches: int, added: Callable[[Batch], Any]) -> float:
    """Accumulate the gradient over equal cuts of the rows; return the loss."""
    valid = float(batch["loss_mask"].sum())
    total = 0.0
    for index in np.split(np.arange(len(batch["tokens"])), microbatches):
        part = {name: array[index] for name, array in batch.items()}
        nll = torch.nn.functional.cross_entropy(
            forward(model, part).flatten(0, 1),
            torch.from_numpy(part["labels"]).long().flatten(),
            reduction="none",
        )
        loss = (nll * torch.from_numpy(part["loss_mask"]).flatten()).sum() / valid
        (loss + added(part)).backward()
        total += float(loss.detach())
    return total
