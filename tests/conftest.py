"""Test environment: eight fake CPU devices, exact matrix products and a shared compile cache.

Everything is set through environment variables before JAX is imported, so a subprocess that a test
starts inherits it. A test that needs another number of devices passes its own ``XLA_FLAGS`` (or
``runtime.cpu_devices``) to a subprocess.

GPU tests run with ``pytest -m gpu`` (or ``JAXTRON_TEST_GPU=1``); then JAX keeps its GPUs.
"""

import os
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# Tiny shapes spend their time in the compiler: 3 s -> 0.9 s of processor time for a training step.
FAST_COMPILE_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if [int(n) for n in metadata.version("jaxlib").split(".")[:2]] < [0, 11]:  # unknown to 0.11
    FAST_COMPILE_FLAGS += " --xla_cpu_use_fusion_emitters=false"


def _wants_gpu(config: pytest.Config) -> bool:
    expression = config.option.markexpr or ""
    selected = "gpu" in expression and "not gpu" not in expression
    return selected or os.environ.get("JAXTRON_TEST_GPU") == "1"


def pytest_configure(config: pytest.Config) -> None:
    environment = os.environ
    if _wants_gpu(config):
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        environment["JAX_PLATFORMS"] = "cpu"
    flags = environment.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags:
        flags = f"{flags} {DEVICE_COUNT_FLAG}=8".strip()
    if not _wants_gpu(config):
        flags = f"{flags} {FAST_COMPILE_FLAGS}"
    environment["XLA_FLAGS"] = flags
    # Parity is judged in full fp32: the default may multiply in TF32 on a GPU.
    environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    # Processes (xdist workers, subprocesses, the next run) share compiled programs.
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # matplotlib and the tokenizers library: no display, no warning about forks.
    environment.setdefault("MPLBACKEND", "Agg")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Subprocesses find the package whether or not it is installed.
    paths = [str(REPOSITORY), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _wants_gpu(config):
        return
    skip = pytest.mark.skip(reason="GPU tests run on their own: pytest -m gpu")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("gpu"):
        return
    import jax

    try:
        jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX finds no GPU: {error}")
