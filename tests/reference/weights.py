"""Tensors of a ``transformers`` model, by name, as a tree like jaxtron's parameters.

The map only moves numbers about, so it serves weights and gradients alike.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxtron.models.config import ModelConfig

Tensors = Mapping[str, np.ndarray]


def to_params(family: str, tensors: Tensors, config: ModelConfig) -> dict[str, Any]:
    """The parameter tree of a ``llama`` or ``gpt2``; rows that pad the vocabulary are 0."""
    return _FAMILIES[family](tensors, config)


def _pad_rows(embedding: np.ndarray, config: ModelConfig) -> np.ndarray:
    return np.pad(embedding, [(0, config.padded_vocab_size - len(embedding)), (0, 0)])


def _stack(
    config: ModelConfig, layer: Callable[[int], dict[str, dict[str, np.ndarray]]]
) -> dict[str, dict[str, np.ndarray]]:
    each = [layer(i) for i in range(config.num_layers)]
    return {
        part: {name: np.stack([one[part][name] for one in each]) for name in leaves}
        for part, leaves in each[0].items()
    }


def _llama(tensors: Tensors, config: ModelConfig) -> dict[str, Any]:
    """Linear weights are ``[out, in]``."""

    def layer(i: int) -> dict[str, dict[str, np.ndarray]]:
        def get(name: str) -> np.ndarray:
            return tensors[f"model.layers.{i}.{name}.weight"]

        def heads(name: str) -> np.ndarray:  # [embed, heads, head_dim]
            weight = get(f"self_attn.{name}_proj")
            return weight.T.reshape(config.hidden_size, -1, config.head_dim)

        return {
            "attention_norm": {"weight": get("input_layernorm")},
            "attention": {
                "query": heads("q"),
                "key_value": np.stack([heads("k"), heads("v")], axis=1),
                "output": get("self_attn.o_proj").T.reshape(
                    config.num_attention_heads, config.head_dim, config.hidden_size
                ),
            },
            "mlp_norm": {"weight": get("post_attention_layernorm")},
            "mlp": {
                "up": np.stack([get("mlp.gate_proj").T, get("mlp.up_proj").T], axis=1),
                "down": get("mlp.down_proj").T,
            },
        }

    return {
        "embedding": {"word": _pad_rows(tensors["model.embed_tokens.weight"], config)},
        "layers": _stack(config, layer),
        "final_norm": {"weight": tensors["model.norm.weight"]},
        "output": {"weight": _pad_rows(tensors["lm_head.weight"], config)},
    }


def _gpt2(tensors: Tensors, config: ModelConfig) -> dict[str, Any]:
    """``Conv1D`` weights are ``[in, out]``; queries, keys and values stand side by side in one."""

    def layer(i: int) -> dict[str, dict[str, np.ndarray]]:
        def get(name: str) -> np.ndarray:
            return tensors[f"transformer.h.{i}.{name}"]

        def norm(name: str) -> dict[str, np.ndarray]:
            return {"weight": get(f"{name}.weight"), "bias": get(f"{name}.bias")}

        head = (config.num_attention_heads, config.head_dim)
        qkv = get("attn.c_attn.weight").reshape(config.hidden_size, 3, *head)
        qkv_bias = get("attn.c_attn.bias").reshape(3, *head)
        return {
            "attention_norm": norm("ln_1"),
            "attention": {
                "query": qkv[:, 0],
                "query_bias": qkv_bias[0],
                "key_value": qkv[:, 1:],
                "key_value_bias": qkv_bias[1:],
                "output": get("attn.c_proj.weight").reshape(*head, config.hidden_size),
                "output_bias": get("attn.c_proj.bias"),
            },
            "mlp_norm": norm("ln_2"),
            "mlp": {
                "up": get("mlp.c_fc.weight")[:, None],
                "up_bias": get("mlp.c_fc.bias")[None],
                "down": get("mlp.c_proj.weight"),
                "down_bias": get("mlp.c_proj.bias"),
            },
        }

    return {
        "embedding": {
            "word": _pad_rows(tensors["transformer.wte.weight"], config),
            "position": tensors["transformer.wpe.weight"],
        },
        "layers": _stack(config, layer),
        "final_norm": {
            "weight": tensors["transformer.ln_f.weight"],
            "bias": tensors["transformer.ln_f.bias"],
        },
    }


_FAMILIES = {"llama": _llama, "gpt2": _gpt2}
