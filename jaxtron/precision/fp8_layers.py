"""Which products of which layers stay out of FP8."""

import fnmatch
from collections.abc import Iterable

from jaxtron.errors import ConfigError
from jaxtron.precision.config import PrecisionConfig


def bf16_layers(config: PrecisionConfig, num_layers: int) -> frozenset[int]:
    """Layers that ``first_last_layers_bf16`` keeps in the compute format."""
    if not config.first_last_layers_bf16:
        return frozenset()
    end = num_layers - config.num_layers_at_end_in_bf16
    numbers = range(num_layers)
    return frozenset(i for i in numbers if i < config.num_layers_at_start_in_bf16 or i >= end)


def has_layer_exceptions(config: PrecisionConfig) -> bool:
    """Whether layers may differ in which of their products are FP8."""
    by_layer = any(not pattern.startswith("*/") for pattern in config.fp8_exceptions)
    return config.fp8 is not None and (config.first_last_layers_bf16 or by_layer)


def exceptions(
    config: PrecisionConfig, products: Iterable[str], num_layers: int
) -> frozenset[tuple[int, str]]:
    """Pairs of layer number and product that stay in the compute format.

    Args:
        config: the section.
        products: names of the model's products, ``mlp/up``.
        num_layers: layers of the model.

    Raises:
        ConfigError: a pattern names nothing, or nothing is left in FP8.
    """
    names = sorted(set(products))
    every = {(i, name) for i in range(num_layers) for name in names}
    kept = {(i, name) for i, name in every if i in bf16_layers(config, num_layers)}
    for pattern in config.fp8_exceptions:
        found = {(i, name) for i, name in every if fnmatch.fnmatchcase(f"{i}/{name}", pattern)}
        if not found:
            raise ConfigError(
                f"precision.fp8_exceptions: {pattern!r} names no product: a pattern is "
                f"layer/module/product, with layers 0 to {num_layers - 1} and products "
                f"{', '.join(names)}; for example '*/{names[-1]}' or '0/*'"
            )
        kept |= found
    if kept == every:
        raise ConfigError(
            f"precision.fp8 is {config.fp8}, but first_last_layers_bf16 and fp8_exceptions leave "
            "no product in FP8: set precision.fp8 to null, or keep fewer layers in bf16"
        )
    return frozenset(kept)
