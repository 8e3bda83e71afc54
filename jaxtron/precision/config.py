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
