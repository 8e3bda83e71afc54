"""What the machine can do and what it holds: peak arithmetic and memory figures."""

import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

PEAK_BF16_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"GB[23]00", 2500.0),
    (r"B[23]00", 2250.0),
    (r"GH200", 989.4),
    (r"H200", 989.4),
    (r"H100 PCIe", 756.5),
    (r"H100 NVL", 835.5),
    (r"H100", 989.4),
    (r"H800", 989.4),
    (r"H20", 148.0),
    (r"A[18]00", 312.0),
    (r"L40S", 362.0),
    (r"L4", 121.0),
    (r"A10", 125.0),
)
"""Device kind (matched as whole words) and its dense bf16 peak [TFLOP/s], from NVIDIA's data
sheets without sparsity. The first match counts, so special forms stand before general ones."""


def peak_tflops(device_kind: str, override: float | None = None) -> float | None:
    """Peak arithmetic of one device [TFLOP/s], dense bf16.

    Args:
        device_kind: JAX's name of the device (``jax.Device.device_kind``).
        override: the peak to use instead (``observe.peak_tflops``).

    Returns:
        The peak, or None for a device that the table does not know: a CPU, another GPU, or a slice
        of a GPU (MIG), whose peak is not the card's.
    """
    if override is not None:
        return override
    if re.search(r"\bMIG\b", device_kind):
        return None
    for pattern, peak in PEAK_BF16_TFLOPS:
        if re.search(rf"\b{pattern}\b", device_kind):
            return peak
    return None


def peak_fp8_tflops(device_kind: str) -> float | None:
    """Peak arithmetic of one device in dense FP8 [TFLOP/s]: twice that of bf16, from Ada on.

    None for a device that the table does not know, or without FP8 tensor cores.
    """
    if re.search(r"\bA(10|[18]00)\b", device_kind):
        return None
    peak = peak_tflops(device_kind)
    return None if peak is None else 2 * peak


def memory_figures(devices: Sequence[jax.Device] | None = None) -> dict[str, int | None]:
    """Memory in use, for a metrics line.

    Args:
        devices: the devices to ask; None: those of this process.

    Returns:
        ``memory_in_use_bytes`` and ``memory_peak_bytes``: the fullest of the devices, now and since
        the start of the process (None where the devices do not count, as on CPU), and
        ``host_rss_bytes``: resident memory of this process.
    """
    stats = [device.memory_stats() or {} for device in devices or jax.local_devices()]
    return {
        "memory_in_use_bytes": _largest(stats, "bytes_in_use"),
        "memory_peak_bytes": _largest(stats, "peak_bytes_in_use"),
        "host_rss_bytes": resident_bytes(),
    }


def resident_bytes() -> int:
    """Resident memory of this process [bytes]; its peak where the system has no /proc."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _largest(stats: Sequence[dict[str, int]], name: str) -> int | None:
    values = [entry[name] for entry in stats if name in entry]
    return max(values) if values else None
