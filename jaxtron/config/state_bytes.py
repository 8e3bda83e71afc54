"""Bytes of training state a GPU holds under a layout, from closed forms."""

import dataclasses
from collections.abc import Mapping

from jaxtron.config.config import Config
from jaxtron.observe.flops import parameter_count

ZERO_AXES = ("fsdp", "expert", "context")
"""Axes over which data-parallel sharding splits the state."""


def state_bytes_per_device(config: Config, axes: Mapping[str, int]) -> int:
    """Weights, gradients and AdamW state on one device [bytes], activations not counted.

    With P parameters a device (tensor and pipeline split them evenly): bf16 weights 2P, fp32
    gradients 4P, fp32 master weights and two moments 12P. ``data_sharding`` divides some of these
    by the number of shards; ``optim_grads_params`` gathers the weights of two layers at a time.

    Args:
        config: model and ``parallel.data_sharding``.
        axes: size of each mesh axis.
    """
    model_shards = axes["tensor"] * axes["pipeline"]
    params = parameter_count(config.model) / model_shards
    shards = 1
    for axis in ZERO_AXES:
        shards *= axes[axis]
    match config.parallel.data_sharding:
        case "no_shard":
            return round(18 * params)
        case "optim":
            return round(6 * params + 12 * params / shards)
        case "optim_grads":
            return round(2 * params + 16 * params / shards)
        case "optim_grads_params":
            return round(16 * params / shards + 2 * 2 * _layer_parameters(config) / axes["tensor"])


def _layer_parameters(config: Config) -> int:
    one_more = dataclasses.replace(config.model, num_layers=config.model.num_layers + 1)
    return parameter_count(one_more) - parameter_count(config.model)
