"""Peaks by device kind, memory figures, rates."""

import jax
import jax.numpy as jnp
import pytest

from jaxtron.models.config import ModelConfig
from jaxtron.observe.flops import FlopsPerToken, flops_per_token, mean_causal_keys_of
from jaxtron.observe.hardware import memory_figures, peak_tflops
from jaxtron.observe.throughput import Keys, Throughput


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
    ],
)
def test_known_gpus_have_their_dense_bf16_peak(kind, peak):
    assert peak_tflops(kind) == peak


@pytest.mark.parametrize(
    "kind",
    ["cpu", "NVIDIA RTX A1000", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "Tesla V100", "NVIDIA L400"],
)
def test_an_unknown_device_has_no_peak(kind):
    assert peak_tflops(kind) is None


def test_the_override_beats_the_table():
    assert peak_tflops("NVIDIA H100 80GB HBM3", 1979.0) == 1979.0
    assert peak_tflops("cpu", 0.5) == 0.5


class FakeDevice:
    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


def test_memory_is_that_of_the_fullest_device():
    devices = [
        FakeDevice({"bytes_in_use": 10, "peak_bytes_in_use": 70}),
        FakeDevice({"bytes_in_use": 30, "peak_bytes_in_use": 50}),
    ]
    figures = memory_figures(devices)
    assert figures["memory_in_use_bytes"] == 30
    assert figures["memory_peak_bytes"] == 70


def test_on_cpu_device_memory_is_null_and_the_process_counts():
    figures = memory_figures(jax.local_devices(backend="cpu"))
    assert figures["memory_in_use_bytes"] is None
    assert figures["memory_peak_bytes"] is None
    assert 10 * 2**20 < figures["host_rss_bytes"] < 100 * 2**30


@pytest.mark.gpu
def test_on_a_gpu_device_memory_and_peak_are_known():
    device = jax.local_devices()[0]
    array = jax.block_until_ready(jax.numpy.ones((1 << 26,), "float32"))
    figures = memory_figures()
    assert figures["memory_in_use_bytes"] >= array.nbytes
    assert figures["memory_peak_bytes"] >= array.nbytes
    assert peak_tflops(device.device_kind) is not None


def test_rates_are_per_device():
    """1,000,000 tokens in 10 s on 4 devices at 8 and 10 GFLOP a token, peak 400 TFLOP/s."""
    rates = Throughput(FlopsPerToken(8e9, 10e9), 4, 400.0).rates(1_000_000, 10.0)
    assert rates == {
        "tokens_per_s_per_gpu": 25_000.0,
        "tflops_per_gpu": 200.0,
        "tflops_per_gpu_full_attention": 250.0,
        "mfu": 0.5,
    }


@pytest.mark.parametrize("window", [None, 300])
def test_packed_documents_count_like_sequences_of_their_lengths(window):
    """Documents of 1000, 200 and 50 tokens on one device, each by the formula of whole rows."""
    lengths = [1000, 200, 50]
    model = ModelConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        vocab_size=100,
        max_position_embeddings=1000,
        window_size=window,
    )
    alone = [flops_per_token(model, n) for n in lengths]
    causal = float(sum(n * mean_causal_keys_of(jnp.array(n), window) for n in lengths))
    keys = Keys(causal, float(sum(n * n for n in lengths)))
    rates = Throughput.of(model, 4096).rates(1250, 1e-6, keys)
    share = 1e-6 * 1e12 * jax.device_count()
    total = sum(n * flops.causal for n, flops in zip(lengths, alone))
    assert rates["tflops_per_gpu"] == pytest.approx(total / share, rel=1e-6)
    total = sum(n * flops.full_attention for n, flops in zip(lengths, alone))
    assert rates["tflops_per_gpu_full_attention"] == pytest.approx(total / share, rel=1e-6)


def test_without_a_peak_there_is_no_mfu():
    assert Throughput(FlopsPerToken(1.0, 1.0), 1, None).rates(1, 1.0)["mfu"] is None
