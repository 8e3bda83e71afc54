"""Models with experts from ``transformers``, what balances their routers, and their weights.

The losses and the bias are written out once more, token by token unit, from their papers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from jaxtron.models.config import ModelConfig
from tests.reference.weights import Tensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEQ = 32
COMMON = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQ,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
}
YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "Mixtral",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 80,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "intermediate_size": 80,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
            "n_routed_experts": 16,
            "n_shared_experts": 2,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 2000.0, **YARN},
        },
    ),
}
OURS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_layers": 2,
        "ffn_hidden_size": 40,
        "num_query_groups": 2,
        "num_experts": 6,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.2,
    },
    "qwen3_moe": {
        "num_layers": 2,
        "ffn_hidden_size": 80,
        "moe_ffn_hidden_size": 24,
        "num_query_groups": 2,
        "kv_channels": 16,
        "qk_layernorm": True,
        "num_experts": 8,
        "moe_router_topk": 3,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.2,
        "moe_z_loss_coeff": 0.1,
    },
    "deepseek_v3": {
        "num_layers": 3,
        "ffn_hidden_size": 80,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 48,
        "moe_layer_freq": [0, 1, 1],
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 12,
        "rope_scaling": {"type": "yarn", **YARN},
        "num_experts": 16,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.2,
    },
}
"""Keys of ``model``; :func:`our_keys` adds what all have."""


def our_keys(family: str) -> dict[str, Any]:
    """The family's architecture in the keys of the configuration."""
    return {
        "vocab_size": COMMON["vocab_size"],
        "hidden_size": COMMON["hidden_size"],
        "num_attention_heads": COMMON["num_attention_heads"],
        "layernorm_epsilon": COMMON["rms_norm_eps"],
        "rotary_base": 2000.0,
        **OURS[family],
    }


def build(family: str) -> Any:
    """A tiny model with random weights; norms and biases moved off 1 and 0."""
    name, keys = THEIRS[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **COMMON, **keys, attn_implementation="eager", experts_implementation="eager"
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
        for gate in gates(model):
            gate.weight.normal_(0, 0.3)
            if hasattr(gate, "e_score_correction_bias"):
                gate.e_score_correction_bias.normal_(0, 0.1)
    return model.train()


def gates(model: Any) -> list[Any]:
    """The routers, layer by layer."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


class Balance:
    """Losses of the routers in a step, and the loads that it leaves.

    Args:
        model: of :func:`build`; its routers report every call.
        keys: of :func:`our_keys`.
    """

    def __init__(self, model: Any, keys: Mapping[str, Any]) -> None:
        self.keys, self.gates = keys, gates(model)
        self.calls: list[list[Any]] = [[] for _ in self.gates]
        for calls, gate in zip(self.calls, self.gates, strict=True):
            gate.register_forward_hook(lambda _, __, out, calls=calls: calls.append(out))

    def start(self, live: np.ndarray) -> None:
        """A step begins, whose tokens are ``live [rows, seq]``."""
        experts = self.keys["num_experts"]
        self.total = int(live.sum())
        self.loads = [torch.zeros(experts) for _ in self.gates]
        self.earlier = [torch.zeros(experts) for _ in self.gates]

    def losses(self, live: np.ndarray) -> Any:
        """What the routers add to the objective for the rows that they saw last."""
        topk, sigmoid = self.keys.get("moe_router_topk", 2), "deepseek" in str(type(self.gates[0]))
        total = torch.zeros(())
        kept = torch.from_numpy(live)
        for layer, calls in enumerate(self.calls):
            logits, _, chosen = calls[-1]
            experts = logits.shape[-1]
            logits = logits.reshape(*kept.shape, experts)
            scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=-1)
            scores = scores / scores.sum(dim=-1, keepdim=True)
            by_score = torch.nn.functional.one_hot(logits.topk(topk).indices, experts).sum(dim=-2)
            chosen = torch.nn.functional.one_hot(chosen.reshape(*kept.shape, topk), experts)
            self.loads[layer] += chosen.sum(dim=-2)[kept].sum(dim=0)
            kind = self.keys["moe_router_load_balancing_type"]
            rows = range(len(kept)) if kind == "seq_aux_loss" else [slice(None)]
            for unit in rows:
                p, n = scores[unit][kept[unit]], by_score[unit][kept[unit]].sum(dim=0).float()
                if not len(p):
                    continue
                if kind == "global_aux_loss":
                    self.earlier[layer] += n
                    n = self.earlier[layer]
                share = n / n.sum()
                loss = experts * (p.mean(dim=0) * share).sum()
                weight = len(p) / self.total
                total = total + self.keys["moe_aux_loss_coeff"] * weight * loss
            squares = torch.logsumexp(logits, dim=-1)[kept] ** 2
            total = total + self.keys.get("moe_z_loss_coeff", 0.0) * squares.sum() / self.total
            calls.clear()
        return total

    def end(self) -> None:
        """Move the biases against the loads of the step."""
        rate = self.keys.get("moe_router_bias_update_rate")
        if rate is not None:
            for gate, load in zip(self.gates, self.loads, strict=True):
                gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)

    def biases(self) -> np.ndarray:
        """``[layers, experts]``."""
        return np.stack([gate.e_score_correction_bias.numpy().copy() for gate in self.gates])


def to_tree(tensors: Tensors, config: ModelConfig) -> dict[str, Any]:
    """Tensors of a model of :func:`build` as a tree like jaxtron's, without the biases."""
    padding = config.padded_vocab_size - config.vocab_size
    layers = [_layer(i, tensors, config) for i in range(config.num_layers)]
    dense = config.num_dense_layers
    return {
        **{f"dense_{i}": layer for i, layer in enumerate(layers[:dense])},
        "embedding": {"word": np.pad(tensors["model.embed_tokens.weight"], [(0, padding), (0, 0)])},
        "layers": _stacked(layers[dense:]),
        "final_norm": {"weight": tensors["model.norm.weight"]},
        "output": {"weight": np.pad(tensors["lm_head.weight"], [(0, padding), (0, 0)])},
    }


def _stacked(layers: list[Any]) -> Any:
    if isinstance(layers[0], dict):
        return {name: _stacked([layer[name] for layer in layers]) for name in layers[0]}
    return np.stack(layers)


def _layer(i: int, tensors: Tensors, config: ModelConfig) -> dict[str, Any]:
    def get(name: str) -> np.ndarray:
        return tensors[f"model.layers.{i}.{name}"]

    def mlp(name: str) -> dict[str, np.ndarray]:
        both = [get(f"{name}.{part}_proj.weight").T for part in ("gate", "up")]
        return {"up": np.stack(both, axis=1), "down": get(f"{name}.down_proj.weight").T}

    layer: dict[str, Any] = {
        "attention_norm": {"weight": get("input_layernorm.weight")},
        "mlp_norm": {"weight": get("post_attention_layernorm.weight")},
        "attention": (_latent if config.multi_latent_attention else _attention)(get, config),
    }
    if not config.layer_pattern[i]:
        return {**layer, "mlp": mlp("mlp")}
    both = get("mlp.experts.gate_up_proj")  # [experts, gate then up, embed]
    layer["moe"] = {
        "router": {"weight": get("mlp.gate.weight")},
        "experts": {
            "up": both.reshape(len(both), 2, -1, both.shape[-1]).transpose(0, 3, 1, 2),
            "down": get("mlp.experts.down_proj").transpose(0, 2, 1),
        },
    }
    if config.moe_shared_expert_intermediate_size:
        layer["moe"]["shared"] = mlp("mlp.shared_experts")
    return layer


def _attention(get: Any, config: ModelConfig) -> dict[str, Any]:
    def heads(name: str) -> np.ndarray:
        weight = get(f"self_attn.{name}_proj.weight")
        return weight.T.reshape(config.hidden_size, -1, config.head_dim)

    norms = {}
    if config.qk_layernorm:
        norms = {
            f"{ours}_norm": {"weight": get(f"self_attn.{theirs}_norm.weight")}
            for ours, theirs in (("query", "q"), ("key", "k"))
        }
    return {
        **norms,
        "query": heads("q"),
        "key_value": np.stack([heads("k"), heads("v")], axis=1),
        "output": get("self_attn.o_proj.weight").T.reshape(
            config.num_attention_heads, config.head_dim, config.hidden_size
        ),
    }


def _latent(get: Any, config: ModelConfig) -> dict[str, Any]:
    """They rotate neighbouring channels, we the halves."""
    heads, rotated = config.num_attention_heads, config.qk_pos_emb_head_dim
    halves = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2)])

    def in_halves(weight: np.ndarray) -> np.ndarray:
        content = weight.shape[-1] - rotated
        return np.concatenate([weight[..., :content], weight[..., content:][..., halves]], axis=-1)

    def by_head(name: str) -> np.ndarray:
        weight = get(f"self_attn.{name}.weight").T
        return weight.reshape(weight.shape[0], heads, -1)

    return {
        "query_down": get("self_attn.q_a_proj.weight").T,
        "query_norm": {"weight": get("self_attn.q_a_layernorm.weight")},
        "query": in_halves(by_head("q_b_proj")),
        "key_value_down": in_halves(get("self_attn.kv_a_proj_with_mqa.weight").T),
        "key_value_norm": {"weight": get("self_attn.kv_a_layernorm.weight")},
        "key_value": by_head("kv_b_proj"),
        "output": get("self_attn.o_proj.weight").T.reshape(heads, -1, config.hidden_size),
    }
