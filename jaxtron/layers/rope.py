"""Rotary position embedding (RoPE) and its context extensions.

Su et al. 2021, arXiv:2104.09864, in the half-split convention: channel ``i`` of a head is rotated
together with channel ``i + rotary_dim / 2``, as Hugging Face and Megatron's non-interleaved form
do. Extensions: linear interpolation (Chen et al. 2023, arXiv:2306.15595), Llama 3.1's rule, and
YaRN (Peng et al. 2023, arXiv:2309.00071).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtron.errors import ConfigError
from jaxtron.models.config import ModelConfig

_WHERE = "model.rope_scaling"

_POSITIVE = {"factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, dict[str, Any]] = {
    "linear": {},
    "llama3": {},
    "yarn": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "attention_factor": None,
        "truncate": True,
    },
}


def rope_scaling_parameters(config: ModelConfig) -> dict[str, Any]:
    """``model.rope_scaling`` checked and completed with defaults; ``{}`` when it is null.

    Types and their keys (required, then optional with defaults):

    - ``linear``: ``factor``
    - ``llama3``: ``factor, low_freq_factor, high_freq_factor, original_max_position_embeddings``
    - ``yarn``: ``factor, original_max_position_embeddings``; ``beta_fast 32, beta_slow 1,
      mscale 1, mscale_all_dim 0`` (or ``attention_factor`` in place of the two), ``truncate true``
      (round the bounds of the ramp to whole channels)

    Raises:
        ConfigError: unknown type, missing or unknown key, or a value out of range.
    """
    if config.rope_scaling is None:
        return {}
    given = dict(config.rope_scaling)
    kind = given.get("type")
    if kind not in _REQUIRED:
        raise ConfigError(
            f"{_WHERE}.type is {kind!r}; it must be one of {', '.join(_REQUIRED)} "
            f"(or set {_WHERE} to null)"
        )
    required, optional = _REQUIRED[kind], _OPTIONAL[kind]
    missing = [name for name in required if name not in given]
    unknown = [name for name in given if name != "type" and name not in {*required, *optional}]
    if missing or unknown:
        problems = [f"lacks {', '.join(missing)}"] if missing else []
        problems += [f"has unknown {', '.join(unknown)}"] if unknown else []
        raise ConfigError(
            f"{_WHERE} of type {kind} {' and '.join(problems)}; "
            f"required: {', '.join(required)}; optional: {', '.join(optional) or 'none'}"
        )
    if "attention_factor" in given and {"mscale", "mscale_all_dim"} & given.keys():
        raise ConfigError(
            f"{_WHERE} gives both attention_factor and mscale/mscale_all_dim, which set the same "
            "number; keep one"
        )
    parameters = {**optional, **given}
    for name, value in parameters.items():
        _check_value(name, value)
    _check_order(parameters)
    return parameters


def _check_value(name: str, value: Any) -> None:
    if name == "type" or (name == "attention_factor" and value is None):
        return
    if name == "truncate":
        valid, expected = isinstance(value, bool), "true or false"
    elif name == "original_max_position_embeddings":
        valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        expected = "a positive integer"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        number = number and math.isfinite(value)
        if name == "factor":
            valid, expected = number and value >= 1, "a number of at least 1"
        elif name in _POSITIVE or name == "attention_factor":
            valid, expected = number and value > 0, "a positive number"
        else:
            valid, expected = number and value >= 0, "a number of at least 0"
    if not valid:
        raise ConfigError(f"{_WHERE}.{name} is {value!r}; it must be {expected}")


def _check_order(parameters: dict[str, Any]) -> None:
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in parameters and parameters[low] >= parameters[high]:
            raise ConfigError(
                f"{_WHERE}.{low} is {parameters[low]}; it must be less than {high} "
                f"({parameters[high]})"
            )


def rotary_dim(config: ModelConfig) -> int:
    """Channels of a head that are rotated: ``rotary_percent`` of them, or those MLA sets apart.

    Raises:
        ConfigError: the number is odd or zero, so that channels cannot be paired.
    """
    channels = int(config.rotary_channels)
    if channels < 2 or channels % 2:
        raise ConfigError(
            f"model.rotary_percent={config.rotary_percent} of {config.head_dim} channels a head "
            f"rotates {channels} channels; it must be an even number of at least 2"
        )
    return channels


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Angular frequencies [rotary_dim / 2] float32, in radians per position.

    ``rotary_base ** (-2 i / rotary_dim)``, changed by ``model.rope_scaling``. Computed in float64.

    Raises:
        ConfigError: see :func:`rope_scaling_parameters` and :func:`rotary_dim`.
    """
    scaling = rope_scaling_parameters(config)
    dim = rotary_dim(config)
    frequencies = config.rotary_base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling:
        frequencies = _SCALERS[scaling["type"]](frequencies, config, scaling)
    return frequencies.astype(np.float32)


def _linear(frequencies: np.ndarray, config: ModelConfig, scaling: dict[str, Any]) -> np.ndarray:
    return frequencies / scaling["factor"]


def _llama3(frequencies: np.ndarray, config: ModelConfig, scaling: dict[str, Any]) -> np.ndarray:
    """Keep what turns often within the original context, slow down the rest, blend in between."""
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling["factor"]


def _yarn(frequencies: np.ndarray, config: ModelConfig, scaling: dict[str, Any]) -> np.ndarray:
    """YaRN's ramp over the channels that turn beta_fast to beta_slow times in the old context."""
    dim = 2 * len(frequencies)

    def channel_that_turns(times: float) -> float:
        positions_per_radian = scaling["original_max_position_embeddings"] / (2 * math.pi * times)
        return dim * math.log(positions_per_radian) / (2 * math.log(config.rotary_base))

    first, last = channel_that_turns(scaling["beta_fast"]), channel_that_turns(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (last - first) or 0.001  # a ramp of no width is a step
    interpolated = np.clip((np.arange(dim // 2) - first) / width, 0.0, 1.0)
    return frequencies * (1 - interpolated) + frequencies / scaling["factor"] * interpolated


_SCALERS: dict[str, Callable[[np.ndarray, ModelConfig, dict[str, Any]], np.ndarray]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def rotary_attention_factor(config: ModelConfig) -> float:
    """Factor on cosines and sines: YaRN's attention temperature, 1.0 for everything else.

    ``mscale(m) = 0.1 m ln(factor) + 1``; the factor is ``mscale(mscale) / mscale(mscale_all_dim)``
    unless ``attention_factor`` gives it directly. Queries and keys both carry it, so attention
    scores are multiplied by its square.
    """
    scaling = rope_scaling_parameters(config)
    if scaling.get("type") != "yarn":
        return 1.0
    if scaling["attention_factor"] is not None:
        return float(scaling["attention_factor"])
    log_factor = math.log(scaling["factor"])
    numerator = 0.1 * scaling["mscale"] * log_factor + 1
    return numerator / (0.1 * scaling["mscale_all_dim"] * log_factor + 1)


def attention_temperature(config: ModelConfig) -> float:
    """Factor on attention scores that MLA adds to ``1 / sqrt(channels)``.

    ``(0.1 mscale_all_dim ln(factor) + 1)^2`` with YaRN (DeepSeek-V2, arXiv:2405.04434, and its
    published code), else 1.
    """
    scaling = rope_scaling_parameters(config)
    if scaling.get("type") != "yarn":
        return 1.0
    return (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2


def rotary_tables(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of every position.

    Args:
        config: gives the frequencies and YaRN's factor.
        positions: int32 [..., seq], positions within the document or sequence.

    Returns:
        (cos, sin), each float32 [..., seq, rotary_dim / 2].
    """
    angles = positions[..., None].astype(jnp.float32) * rotary_frequencies(config)
    factor = np.float32(rotary_attention_factor(config))
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


@jax.named_scope("rotary")
def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the first ``rotary_dim`` channels of every head; the others pass.

    Args:
        x: queries or keys [batch, seq, heads, head_dim].
        cos: float32 [seq, rotary_dim / 2] shared by all rows, or [batch, seq, rotary_dim / 2].
        sin: as ``cos``.

    Returns:
        As ``x`` in shape and dtype; the arithmetic is float32.
    """
    cos, sin = cos[..., None, :], sin[..., None, :]  # broadcast over heads
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)
