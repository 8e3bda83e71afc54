"""Configuration of number formats."""

from typing import Literal

from jaxtron.config.fields import key, section


@section
class PrecisionConfig:
    """Formats of parameters, arithmetic and gradient reduction."""

    compute: Literal["bf16", "fp32"] = key("bf16", "Format of matrix products and activations.")
    params: Literal["fp32"] = key("fp32", "Format of the master weights.")
    grads: Literal["fp32"] = key("fp32", "Format in which gradients are accumulated.")
    grad_reduce: Literal["fp32", "bf16"] = key(
        "fp32", "Format in which gradients are summed over devices."
    )
    fp8: Literal["current", "delayed", "blockwise", "mxfp8", "nvfp4"] | None = key(
        None,
        "Recipe of the layers' matrix products in 8 bits: scales from the tensor itself (current); "
        "null: none.",
    )
    fp8_backend: Literal["auto", "xla"] = key(
        "auto", "Who multiplies FP8 matrices; auto is xla, which runs everywhere."
    )
    fp8_format: Literal["hybrid", "e4m3"] = key(
        "hybrid", "E4M3 everywhere, or with E5M2 for gradients (hybrid)."
    )
    fp8_amax_scope: Literal["tensor", "global"] = key(
        "tensor",
        "What a scale covers: the tensor of one data-parallel replica, or of a whole microbatch.",
    )
    fp8_exceptions: list[str] = key(
        [],
        "Products that stay in the compute format, as patterns of layer/module/product: "
        "'*/mlp/down', '0/*'. Products: attention/qkv, attention/output, mlp/up, mlp/down.",
    )
    first_last_layers_bf16: bool = key(
        False, "Keep the first and last layers in the compute format under FP8."
    )
    num_layers_at_start_in_bf16: int = key(
        1, "First layers that first_last_layers_bf16 keeps.", ge=0
    )
    num_layers_at_end_in_bf16: int = key(1, "Last layers that first_last_layers_bf16 keeps.", ge=0)
