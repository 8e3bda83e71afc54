import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.errors import ConfigError
from jaxtron.layers.rope import (
    apply_rotary,
    rotary_attention_factor,
    rotary_frequencies,
    rotary_tables,
)
from jaxtron.models.config import ModelConfig

LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def model(**changes: Any) -> ModelConfig:
    config = ModelConfig(
        num_layers=1,
        hidden_size=64,
        ffn_hidden_size=64,
        num_attention_heads=4,
        vocab_size=8,
        max_position_embeddings=131072,
    )
    return dataclasses.replace(config, **changes)


def test_plain_frequencies_follow_the_definition():
    expected = [10000 ** (-2 * i / 16) for i in range(8)]
    np.testing.assert_allclose(rotary_frequencies(model()), expected, rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
    scaled = rotary_frequencies(model(rope_scaling={"type": "linear", "factor": 4}))
    np.testing.assert_allclose(scaled, rotary_frequencies(model()) / 4, rtol=1e-6)


def test_llama3_scaling_keeps_fast_slows_slow_and_blends_between():
    frequencies = rotary_frequencies(
        model(kv_channels=128, rotary_base=500000.0, rope_scaling=LLAMA3)
    )
    base = np.array([500000.0 ** (-2 * i / 128) for i in range(64)])
    wavelength = 2 * math.pi / base
    expected = []
    for frequency, length in zip(base, wavelength, strict=True):
        if length < 8192 / 4:
            expected.append(frequency)
        elif length > 8192 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert any(2048 < length < 8192 for length in wavelength)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)


def test_yarn_leaves_the_fastest_and_interpolates_the_slowest_channel():
    frequencies = rotary_frequencies(model(kv_channels=64, rope_scaling=YARN))
    base = np.array([10000.0 ** (-2 * i / 64) for i in range(32)])
    # channels that turn 32 and 1 times in 4096 positions: 64 ln(4096 / 64 pi) / (2 ln 10000)
    # = 10.46 and 64 ln(4096 / 2 pi) / (2 ln 10000) = 22.51; rounded outwards to 10 and 23
    ramp = np.clip((np.arange(32) - 10) / 13, 0, 1)
    np.testing.assert_allclose(frequencies, base * (1 - ramp) + base / 4 * ramp, rtol=1e-6)


def test_yarn_attention_factor():
    assert rotary_attention_factor(model()) == 1.0
    assert rotary_attention_factor(model(rope_scaling=YARN)) == pytest.approx(1.1386294361)
    both = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
    assert rotary_attention_factor(model(rope_scaling=both)) == pytest.approx(1.0)
    one = {**YARN, "mscale": 2.0}
    assert rotary_attention_factor(model(rope_scaling=one)) == pytest.approx(1.2772588722)
    given = {**YARN, "attention_factor": 0.5}
    assert rotary_attention_factor(model(rope_scaling=given)) == 0.5


@pytest.mark.parametrize(
    ("rope_scaling", "head_dim"),
    [
        (None, 16),
        ({"type": "linear", "factor": 2.0}, 16),
        (LLAMA3, 128),
        (YARN, 128),
        ({**YARN, "truncate": False}, 64),
        ({**YARN, "beta_fast": 16.0, "beta_slow": 2.0}, 64),
        ({**YARN, "mscale": 0.8, "mscale_all_dim": 0.4}, 64),
        ({**YARN, "attention_factor": 1.3}, 64),
    ],
)
def test_frequencies_and_factor_equal_those_of_transformers(
    rope_scaling: dict[str, Any] | None, head_dim: int
):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(rope_scaling or {"type": "default"})
    kind = parameters.pop("type")
    theirs = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": 50000.0, **parameters},
    )
    if kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](theirs, device="cpu")
    config = model(kv_channels=head_dim, rotary_base=50000.0, rope_scaling=rope_scaling)
    np.testing.assert_allclose(rotary_frequencies(config), frequencies.numpy(), rtol=2e-6)
    assert rotary_attention_factor(config) == pytest.approx(factor)


def rotated_by_complex_numbers(x: np.ndarray, angles: np.ndarray, factor: float) -> np.ndarray:
    """Channels i and i + half of x [b, s, n, d] as a complex number, turned by [b, s, r/2]."""
    half = angles.shape[-1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)[:, :, None]
    return np.concatenate([factor * turned.real, factor * turned.imag, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("rotary_percent", [1.0, 0.5])
@pytest.mark.parametrize("shared_positions", [True, False])
def test_rotation_is_multiplication_by_a_unit_complex_number(
    rotary_percent: float, shared_positions: bool
):
    config = model(rotary_percent=rotary_percent, rope_scaling=YARN)
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 16))
    positions = np.array([[0, 1, 2, 7, 100], [3, 4, 0, 1, 9000]])
    if shared_positions:
        positions[1] = positions[0]
    given = positions[0] if shared_positions else positions
    cos, sin = rotary_tables(config, jnp.asarray(given, jnp.int32))
    assert cos.dtype == jnp.float32
    assert cos.shape == (*given.shape, 8 * rotary_percent)
    rotated = jax.jit(apply_rotary)(jnp.asarray(x, jnp.float32), cos, sin)
    angles = positions[..., None] * rotary_frequencies(config).astype(np.float64)
    expected = rotated_by_complex_numbers(x, angles, 1.1386294361)
    np.testing.assert_allclose(rotated, expected, atol=2e-3 if not shared_positions else 1e-5)


def test_low_precision_input_is_rotated_in_float32():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, 2, 16)), jnp.bfloat16)
    cos, sin = rotary_tables(model(), jnp.arange(4, dtype=jnp.int32))
    rotated = apply_rotary(x, cos, sin)
    assert rotated.dtype == jnp.bfloat16
    exact = apply_rotary(x.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(rotated, exact.astype(jnp.bfloat16))


def test_scores_depend_only_on_the_distance_of_positions():
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(q_position: int, k_position: int) -> float:
        at = [rotary_tables(model(), jnp.array([p], jnp.int32)) for p in (q_position, k_position)]
        return float(jnp.sum(apply_rotary(q, *at[0]) * apply_rotary(k, *at[1])))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


@pytest.mark.parametrize(
    ("rope_scaling", "message"),
    [
        ({"type": "ntk", "factor": 2.0}, "'ntk'.*linear, llama3, yarn"),
        ({"factor": 2.0}, "type is None"),
        ({"type": "linear"}, "lacks factor"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 1}, "unknown beta_fast"),
        ({"type": "linear", "factor": 0.5}, "factor is 0.5.*at least 1"),
        ({"type": "linear", "factor": "2"}, "factor is '2'"),
        ({"type": "linear", "factor": True}, "factor is True"),
        ({**YARN, "original_max_position_embeddings": 4096.5}, "4096.5.*positive integer"),
        ({**YARN, "beta_fast": 1.0, "beta_slow": 32.0}, "beta_slow is 32.0.*less than"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor is 4.0.*less than"),
        ({**YARN, "truncate": 1}, "truncate is 1"),
        ({**YARN, "attention_factor": 1.0, "mscale": 1.0}, "keep one"),
    ],
)
def test_bad_rope_scaling_is_refused(rope_scaling: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        rotary_frequencies(model(rope_scaling=rope_scaling))


def test_odd_number_of_rotated_channels_is_refused():
    with pytest.raises(ConfigError, match="rotates 3 channels"):
        rotary_frequencies(model(rotary_percent=0.2))
