"""What ``bench step`` prints and saves."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxtron.bench import step
from jaxtron.bench.__main__ import main
from jaxtron.errors import ConfigError
from jaxtron.observe.hardware import peak_fp8_tflops
from tests.launch.two_processes import run_processes, slurm_envs

SMALL = ["model.num_layers=1", "data.seq_length=32", "train.global_batch_size=4"]


def test_the_first_process_of_a_job_says_how_fast_it_was_and_what_ran(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    overrides = ["parallel.fsdp=2", "train.num_microbatches=2", "loss.chunk_tokens=8"]
    overrides += ["precision.fp8=current", "runtime.xla_flags={xla_dump_max_hlo_modules: 3}"]
    words = ["step", "--config", "tiny", "--steps", "3", "--warmup", "0", "--json", str(file)]
    command = ["-m", "jaxtron.bench", *words, "runtime.cpu_devices=1", *SMALL, *overrides]
    first, second = run_processes(command, slurm_envs(2), timeout_s=300)
    assert first.returncode == second.returncode == 0, f"{first}\n{second}"
    assert "tok/s" not in second.stdout and len(file.read_text().splitlines()) == 1
    saved = json.loads(file.read_text())
    times = saved["step_times_s"]
    assert len(times) == 3
    assert saved["step_time_s"] == np.median(times)
    assert saved["spread"] == pytest.approx(np.ptp(times) / np.median(times))
    assert saved["tokens_per_s_per_gpu"] == pytest.approx(4 * 32 / np.median(times) / 2)
    assert saved["tflops_per_gpu_full_attention"] > saved["tflops_per_gpu"] > 0
    assert saved["layout"]["fsdp"] == 2 and saved["microbatches"] == 2
    assert saved["kernels"] == {
        "attention": "xla",
        "products": "fp8 current hybrid (xla)",
        "cross-entropy": "8 of 32 tokens at a time",
    }
    assert saved["mfu"] is None and saved["mfu_fp8"] is None and saved["compile_s"] > 0
    assert "xla_dump_max_hlo_modules=3" in saved["xla_flags"]
    assert {"python", "jax", "jaxlib", "flax", "optax"} <= set(saved["versions"])
    for word in (
        *("ms (spread", "tok/s/GPU", "TF/s/GPU", "full attention", "compile"),
        *("layout: fsdp 2", "kernels: attention xla, products fp8 current", "microbatches 2"),
        *("flags: --", "versions: python 3", "2 x cpu"),
    ):
        assert word in first.stdout


def test_versions_of_cuda_and_the_driver_count_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        def __init__(self, name: str) -> None:
            self.metadata, self.version = {"Name": name}, "9.1"

    names = ["nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-nccl-cu13", "nvidia-ml-py", "numpy"]
    monkeypatch.setattr(step.metadata, "distributions", lambda: map(Installed, names))
    added = set(step.versions("gpu")) - set(step.versions("cpu")) - {"driver"}
    assert added == {"cudnn-cu13", "cublas", "nccl-cu13"}


@pytest.mark.parametrize(
    ("card", "peak"),
    [("NVIDIA H100 80GB HBM3", 1978.8), ("NVIDIA A100-SXM4-80GB", None), ("NVIDIA A10", None)],
)
def test_the_peak_of_fp8_is_twice_that_of_bf16_where_there_is_fp8(
    card: str, peak: float | None
) -> None:
    assert peak_fp8_tflops(card) == peak


def test_a_line_names_the_shares_of_both_peaks() -> None:
    timing = step.StepTiming(
        **dict.fromkeys(step.StepTiming.__dataclass_fields__)
        | {"name": "x", "step_time_s": 1.0, "spread": 0.1, "tokens_per_s_per_gpu": 1.0}
        | {"tflops_per_gpu": 800.0, "tflops_per_gpu_full_attention": 820.0, "compile_s": 1.0}
        | {
            "mfu": 0.809,
            "mfu_fp8": 0.404,
            "memory_peak_bytes": 2**31,
            "loss": 1.0,
            "grad_norm": 1.0,
        }
    )
    assert re.search(r"800.0 TF/s/GPU \(820.0 full .* MFU 80.9% \(40.4% of FP8\)", timing.line())
    assert "peak 2.0 GiB" in timing.line()


@pytest.mark.parametrize(
    "words",
    [
        ["step", "--steps", "0"],
        ["step", "--warmup", "-1"],
        ["step", "--documents", "2048", "nan"],
        ["profile", "--traced-steps=0"],
    ],
)
def test_numbers_that_are_too_small_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--config", "tiny"])
    assert "or more" in capsys.readouterr().err


def test_a_setting_that_nothing_reads_is_refused_before_anything_is_timed() -> None:
    with pytest.raises(ConfigError, match="muon_momentum is 0.9, but optimizer.name is adamw"):
        main(["step", "--config", "tiny", "optimizer.muon_momentum=0.9"])


def test_a_profile_without_a_gpu_is_refused_before_anything_is_timed() -> None:
    with pytest.raises(ConfigError, match="time of a GPU, but the devices are cpu"):
        main(["profile", "--config", "tiny"])


@pytest.mark.parametrize("option", ["--json", "--timeline"])
def test_a_missing_folder_of_results_is_refused_before_anything_is_measured(
    option: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{option} is .*no folder .*missing"):
        main(["profile", "--config", "tiny", option, str(tmp_path / "missing" / "out")])
