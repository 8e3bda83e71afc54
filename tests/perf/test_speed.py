"""Speed against yardsticks that run in the same minute on the same GPU.

Run with ``python -m pytest -m gpu tests/perf -s``. ``recorded.json`` holds, per card, what was
measured last. Both sides fail: slower is a loss, faster is to be recorded.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxtron.data.indexed import IndexedDatasetWriter
from tests.gpu.visible import visible

RECORDED = Path(__file__).with_name("recorded.json")
TOLERANCE = 0.02
TRITON_OFF = "--xla_gpu_enable_triton_gemm=false"  # helps the yardstick as much
MODEL = ["model.vocab_size=32768", "data.seq_length=4096", "data.tokenizer=null"]
STEP = ["train.recompute=none", "train.micro_batch_size=4"]


def run(*command: str, gpus: int = 1, **environment: str) -> str:
    """Output of a Python process on the first ``gpus`` visible GPUs."""
    variables = dict(os.environ, CUDA_VISIBLE_DEVICES=visible(gpus), **environment)
    for name in ("JAX_PLATFORMS", "JAX_DEFAULT_MATMUL_PRECISION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        variables.pop(name, None)
    if "XLA_FLAGS" not in environment:
        variables.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, *command], env=variables, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def bench(folder: Path, name: str, *overrides: str, gpus: int = 1) -> dict:
    file = folder / f"{name}.json"
    run(
        *("-m", "jaxtron.bench", "step", "--config", "llama3_8b", "--json", str(file)),
        *(*MODEL, *STEP, f"parallel.fsdp={gpus}", *overrides),
        gpus=gpus,
    )
    return json.loads(file.read_text())


@functools.cache
def plain_step_time() -> float:
    """Seconds of a plain step."""
    output = run(
        *(str(Path(__file__).with_name("plain_step.py")), "--layers", "8"),
        *("--sequences", "8", "--micro-batch", "4"),
        XLA_FLAGS=TRITON_OFF,
    )
    return json.loads(output)["step_time_s"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_ratio_to_a_plain_step_is_the_recorded_one(precision: str, tmp_path: Path) -> None:
    fp8 = ["precision.fp8=current"] if precision == "fp8" else []
    product = bench(tmp_path, precision, "model.num_layers=8", "train.global_batch_size=8", *fp8)
    card = product["device"]
    ratio = plain_step_time() / product["step_time_s"]
    print(f"{card} {precision}: {product['tflops_per_gpu']:.1f} TF/s, {ratio:.3f} of a plain step")
    recorded = json.loads(RECORDED.read_text()).get(card, {})
    if precision not in recorded:
        pytest.skip(f"nothing is recorded of {precision} on {card}; measured now: {ratio:.3f}")
    assert ratio == pytest.approx(recorded[precision], rel=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize(("gpus", "layers", "sequences"), [(1, 2, 8), (2, 2, 16), (4, 8, 16)])
def test_training_keeps_the_speed_of_the_benchmark(
    gpus: int, layers: int, sequences: int, tmp_path: Path
) -> None:
    """On real files, logging every step, saving in the background."""
    import jax

    if len(jax.devices("gpu")) < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    steps, save = 40, 25
    prefix = tmp_path / "tokens"
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(2000):
            writer.add_document([rng.integers(0, 32768, 1600, dtype=np.uint16)])
        writer.finalize()
    shape = [f"model.num_layers={layers}", f"train.global_batch_size={sequences}"]
    expected = bench(tmp_path, "bench", *shape, gpus=gpus)["step_time_s"]
    run(
        *("-m", "jaxtron.train", "--config", "llama3_8b", *MODEL, *STEP, *shape),
        *(f"parallel.fsdp={gpus}", f"train.steps={steps}"),
        *(f"data.paths=[{prefix}]", "data.split=100,0,0", f"observe.dir={tmp_path / 'run'}"),
        *(f"checkpoint.dir={tmp_path / 'saved'}", f"checkpoint.interval={save}"),
        *("checkpoint.keep=1", "eval.interval=0"),
        gpus=gpus,
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["step_time_s"] for line in lines]
    assert len(times) == steps
    median, while_saving = statistics.median(times[5:]), statistics.median(times[save : save + 10])
    print(
        f"{gpus} GPUs: bench {1e3 * expected:.1f} ms, training {1e3 * median:.1f} ms, "
        f"after a save began {1e3 * while_saving:.1f} ms"
    )
    assert expected / median >= 0.98
    assert expected / while_saving >= 0.98
