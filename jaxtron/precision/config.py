"""Configuration of number formats."""

from typing import Literal

from jaxtron.config.fields import key, section
from jaxtron.errors import ConfigError


@section
class PrecisionConfig:
    """Formats of parameters, arithmetic and gradient reduction."""

    compute: Literal["bf16", "fp16", "fp32"] = key(
        "bf16", "Format of matrix products and activations; fp16 scales the loss."
    )
    logits: Literal["fp32", "bf16"] = key(
        "fp32", "Format to which the output layer rounds logits; softmax and loss are fp32."
    )
    params: Literal["fp32"] = key("fp32", "Format of the master weights.")
    grads: Literal["fp32", "bf16"] = key(
        "fp32",
        "Format in which gradients are summed over the microbatches of a step; bf16 takes half the "
        "memory and rounds every sum.",
    )
    grad_reduce: Literal["fp32", "bf16"] = key(
        "fp32", "Format in which gradients are summed over devices."
    )
    fp8: Literal["current", "delayed", "blockwise", "mxfp8", "nvfp4"] | None = key(
        None,
        "Recipe of the layers' matrix products in 8 bits: scales from the tensor itself (current) "
        "or from the steps before (delayed); null: none.",
    )
    fp8_backend: Literal["auto", "xla", "te"] = key(
        "auto",
        "Who casts to FP8 and multiplies: XLA, which runs everywhere (auto), or Transformer Engine "
        "(te), on GPUs.",
    )
    fp8_format: Literal["hybrid", "e4m3"] = key(
        "hybrid", "E4M3 everywhere, or with E5M2 for gradients (hybrid)."
    )
    fp8_amax_scope: Literal["tensor", "global"] = key(
        "tensor",
        "What a scale covers that comes from the tensor itself (current; evaluation under "
        "delayed): the tensor of one data-parallel replica, or of a whole microbatch.",
    )
    fp8_amax_history_len: int = key(
        1024, "Steps whose largest magnitudes the recipe delayed keeps.", ge=1
    )
    fp8_amax_compute_algo: Literal["max", "most_recent"] = key(
        "max", "What the recipe delayed takes from them: the largest or the newest."
    )
    fp8_exceptions: list[str] = key(
        [],
        "Products that stay in the compute format, as patterns of layer/module/product: "
        "'*/mlp/down', '0/*'. Products: attention/qkv, attention/output, mlp/up, mlp/down.",
    )
    fp8_experts: bool = key(False, "Under FP8 multiply routed experts in 8 bits too.")
    first_last_layers_bf16: bool = key(
        False, "Keep the first and last layers in the compute format under FP8."
    )
    num_layers_at_start_in_bf16: int = key(
        1, "First layers that first_last_layers_bf16 keeps.", ge=0
    )
    num_layers_at_end_in_bf16: int = key(1, "Last layers that first_last_layers_bf16 keeps.", ge=0)
    loss_scale: float | None = key(
        None, "Constant factor on the loss under fp16; null: it follows the gradients.", gt=0
    )
    initial_loss_scale: float = key(2.0**32, "First factor on the loss under fp16.", gt=0)
    min_loss_scale: float = key(1.0, "Smallest factor on the loss under fp16.", gt=0)
    loss_scale_window: int = key(
        1000, "Steps in a row without overflow after which the factor doubles.", ge=1
    )
    hysteresis: int = key(
        2,
        "From this overflow on since the factor last grew, each one halves it.",
        ge=1,
    )

    def __post_init__(self) -> None:
        """Refuse a loss scale that means nothing.

        Raises:
            ConfigError: a constant scale without fp16, or bounds that contradict each other.
        """
        if self.loss_scale is not None and self.compute != "fp16":
            raise ConfigError(
                f"precision.loss_scale is {self.loss_scale:g}, but only fp16 scales the loss and "
                f"precision.compute is {self.compute}: set precision.loss_scale to null"
            )
        if self.min_loss_scale > self.initial_loss_scale:
            raise ConfigError(
                f"precision.min_loss_scale {self.min_loss_scale:g} is more than "
                f"precision.initial_loss_scale {self.initial_loss_scale:g}: lower it"
            )
