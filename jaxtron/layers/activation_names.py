"""The named activations of a transformer layer, which ``train.recompute`` refers to.

Layers mark them with ``checkpoint_name``; a layer of one's own may use the same names.
"""

ACTIVATION_NAMES: dict[str, str] = {
    "attention_norm": "normalised input of attention [b, s/tensor, h]",
    "gathered_sequence": (
        "normalised input of a block, gathered over tensor [b, s, h]; sequence parallelism only"
    ),
    "qkv": (
        "queries, keys and values as the kernel reads them [b, s, heads, d]; with qk_layernorm "
        "also before that norm"
    ),
    "core_attn": "output of the attention kernel [b, s, heads, d]; of a fused one its statistics",
    "attn_proj": "attention's update of the residual stream [b, s/tensor, h]",
    "mlp_norm": "normalised input of the MLP [b, s/tensor, h]",
    "mlp_up": "up projection, and the gate of a gated MLP [b, s, gates, ffn]",
    "mlp_act": "result of the activation function, input of the down projection [b, s, ffn]",
}
"""Meaning and shape of each name; heads and ffn are a device's own.

The update by the MLP has no name: only the next layer's input needs it, which is always kept.
"""

GATHERED_WEIGHT = "gathered_weight"
"""Name of a weight gathered inside a layer (ZeRO-3); kept or not by
``parallel.reshard_after_forward``, whatever ``train.recompute`` says of activations."""
