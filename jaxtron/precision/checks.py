"""FP8 settings that cannot work, with the reason."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxtron.errors import ConfigError
from jaxtron.precision.config import PrecisionConfig
from jaxtron.precision.fp8_layers import bf16_layers, has_layer_exceptions

_USE = "set precision.fp8 to current or delayed"
_NOT_BUILT = {
    "blockwise": (
        "scales per 1x128 and 128x128 block need a matrix product that rescales its partial sums; "
        "XLA does not call the one that cuBLASLt has on Hopper, and what it makes of such scales "
        "is slower than bf16 (docs/fp8.md has the figures)"
    ),
    "mxfp8": (
        "a scale per 32 values is applied by the tensor cores of Blackwell GPUs (compute "
        "capability 10.0) alone, and XLA computes such a product in bf16"
    ),
    "nvfp4": (
        "4-bit values are multiplied by the tensor cores of Blackwell GPUs (compute capability "
        "10.0) alone, and XLA computes such a product in bf16"
    ),
}
_FIRST_WITH_FP8 = 8.9  # compute capability of Ada; Hopper has 9.0


def check_recipe(
    config: PrecisionConfig, num_layers: int, layer_loop: str, axes: Mapping[str, int]
) -> Iterator[str]:
    """Problems of ``precision.fp8*`` that no device can change.

    Args:
        config: the section.
        num_layers: layers of the model.
        layer_loop: ``train.layer_loop``.
        axes: sizes of the mesh axes.
    """
    if config.fp8 is None:
        return
    if config.fp8 in _NOT_BUILT:
        reason = _NOT_BUILT[config.fp8]
        yield f"precision.fp8 is {config.fp8}, which is not available: {reason}: {_USE}"
    if config.compute == "fp16":
        yield (
            f"precision.fp8 is {config.fp8} and precision.compute is fp16: FP8 products add up to "
            "bf16 or fp32: set precision.compute to bf16, or precision.fp8 to null"
        )
    if config.first_last_layers_bf16 and not bf16_layers(config, num_layers):
        yield (
            "precision.first_last_layers_bf16 is true, but precision.num_layers_at_start_in_bf16 "
            "and precision.num_layers_at_end_in_bf16 are 0: set one of them to 1 or more, or "
            "precision.first_last_layers_bf16 to false"
        )
    if len(bf16_layers(config, num_layers)) == num_layers:
        yield (
            f"precision.first_last_layers_bf16 keeps {config.num_layers_at_start_in_bf16} + "
            f"{config.num_layers_at_end_in_bf16} layers in bf16, which is all {num_layers} of "
            "them: set precision.fp8 to null, or make precision.num_layers_at_start_in_bf16 or "
            "precision.num_layers_at_end_in_bf16 smaller"
        )
    if has_layer_exceptions(config) and layer_loop == "scan":
        yield (
            "precision.first_last_layers_bf16 and precision.fp8_exceptions of single layers make "
            "layers differ, but train.layer_loop is scan, which runs one program for all: set "
            "train.layer_loop to unroll or auto"
        )
    if has_layer_exceptions(config) and axes.get("pipeline", 1) > 1:
        yield (
            "precision.first_last_layers_bf16 and precision.fp8_exceptions of single layers make "
            f"layers differ, but parallel.pipeline is {axes['pipeline']}, and all stages run one "
            "program: set precision.first_last_layers_bf16 to false and give exceptions for all "
            "layers ('*/mlp/down'), or parallel.pipeline to 1"
        )


def check_device(config: PrecisionConfig, device: Any) -> None:
    """Refuse FP8 on a GPU without FP8 tensor cores.

    Raises:
        ConfigError: the GPU cannot multiply FP8 matrices.
    """
    if config.fp8 is None or device.platform == "cpu":
        return
    capability = getattr(device, "compute_capability", None)
    if capability is not None and float(capability) < _FIRST_WITH_FP8:
        raise ConfigError(
            f"precision.fp8 is {config.fp8}, but {device.device_kind} (compute capability "
            f"{capability}) has no FP8 tensor cores: they come with Ada (8.9) and Hopper (9.0); "
            "set precision.fp8 to null"
        )
