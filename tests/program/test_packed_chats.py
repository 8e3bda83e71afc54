"""Conversations packed in one row, split over ``context``, are trained as each alone (O07)."""

import json
from pathlib import Path

import jax
import numpy as np

from jaxtron.data.build import build_datasets
from jaxtron.program import Program
from tests.parity.harness import assert_close_leaves, initial_state, make_config

CHATS = [[("user", "hi"), ("assistant", "you")], [("user", "a"), ("assistant", "longer")]]


def test_the_gradient_of_a_packed_row_is_that_of_its_conversations_alone(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]})
        for chat in CHATS
    ]
    path.write_text("\n".join(lines))
    model = {"vocab_size": 257, "max_position_embeddings": 64, "num_layers": 2}

    def run(packing: str, rows: int, parallel: dict):
        config = make_config(
            model=model,
            parallel=parallel,
            data={
                "source": "chat",
                "paths": [str(path)],
                "split": "1",
                "tokenizer": "byte",
                "seq_length": 64,
                "packing": packing,
                "chat_template": {"header": "{role}:", "end": "."},
                "reset_attention_mask": True,
                "reset_position_ids": True,
            },
            train={"global_batch_size": rows},
        )
        data = build_datasets(
            config.data, vocab_size=257, seed=1, train_samples=rows, valid_samples=0, test_samples=0
        ).train
        assert data is not None and len(data) == rows
        batch = {name: np.stack([data[i][name] for i in range(rows)]) for name in data[0]}
        program = Program(config, jax.devices()[: parallel.get("context", 1)])
        params = initial_state(program)["params"]
        loss, tokens, grads = jax.jit(program.loss_and_gradients)(params, program.place(batch))
        return float(loss), int(tokens), jax.tree.map(np.asarray, grads)

    packed = run("best_fit", 1, {"context": 2, "context_strategy": "ring"})
    alone = run("none", 2, {})
    assert packed[1] == alone[1] == len("you.longer.")
    np.testing.assert_allclose(packed[0], alone[0], rtol=1e-6)
    assert_close_leaves(packed[2], alone[2], 2e-5, "gradient")
