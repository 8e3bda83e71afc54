"""The reference models of :mod:`tests.reference.torch_run` in the keys of the configuration."""

from typing import Any

from tests.reference.torch_run import GPT2, LLAMA

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "num_layers": LLAMA["num_hidden_layers"],
        "hidden_size": LLAMA["hidden_size"],
        "ffn_hidden_size": LLAMA["intermediate_size"],
        "num_attention_heads": LLAMA["num_attention_heads"],
        "num_query_groups": LLAMA["num_key_value_heads"],
        "kv_channels": LLAMA["head_dim"],
        "vocab_size": LLAMA["vocab_size"],
        "layernorm_epsilon": LLAMA["rms_norm_eps"],
        "rotary_base": LLAMA["rope_parameters"]["rope_theta"],
    },
    "gpt2": {
        "num_layers": GPT2["n_layer"],
        "hidden_size": GPT2["n_embd"],
        "ffn_hidden_size": GPT2["n_inner"],
        "num_attention_heads": GPT2["n_head"],
        "vocab_size": GPT2["vocab_size"],
        "normalization": "LayerNorm",
        "activation": "gelu_tanh",
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
    },
}
