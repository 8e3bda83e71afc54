"""One configuration trains alike on a CPU in fp32 and on one and several GPUs in bf16.

Run with ``pytest -m gpu tests/gpu``; the arms use CUDA_VISIBLE_DEVICES in processes of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxtron.data.corpus import write_corpus
from jaxtron.data.preprocess import preprocess
from tests.gpu.visible import visible

STEPS = 100


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama on real text, in bytes."""
    folder = tmp_path_factory.mktemp("gpu")
    corpus = write_corpus(folder / "corpus.jsonl", max_bytes=4 << 20)
    preprocess([corpus.path], folder / "tokens", "byte", append_eod=True, workers=4)
    raw = {
        "model": {
            "num_layers": 4,
            "hidden_size": 128,
            "ffn_hidden_size": 384,
            "num_attention_heads": 4,
            "num_query_groups": 4,
            "vocab_size": 257,
            "make_vocab_size_divisible_by": 4,
            "max_position_embeddings": 128,
        },
        "data": {
            "paths": [str(folder / "tokens_text_document")],
            "split": "100,0,0",
            "seq_length": 128,
        },
        "train": {"steps": STEPS, "global_batch_size": 16, "num_microbatches": 2},
        # Low enough that rounding does not grow: at 1e-3 a spike after the warm-up makes even two
        # layouts in bf16 part by more than 0.1.
        "optimizer": {"lr": 5e-4, "min_lr": 5e-5, "lr_warmup_steps": 20},
        "observe": {"tensorboard": False, "progress": "off"},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


def losses(config_file: Path, name: str, gpus: int, *overrides: str) -> list[float]:
    """Loss of every step of a run in its own process."""
    folder = config_file.parent / name
    environment = dict(os.environ)
    for key in ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_PLATFORMS"):
        environment.pop(key, None)
    environment["CUDA_VISIBLE_DEVICES"] = visible(gpus)
    subprocess.run(
        [
            *(sys.executable, "-m", "jaxtron.train", "--config", str(config_file)),
            *(f"observe.dir={folder}", *overrides),
        ],
        env=environment,
        check=True,
        timeout=500,
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def on_cpu(config_file: Path) -> list[float]:
    return losses(config_file, "cpu", 0, "runtime.cpu_devices=1", "precision.compute=fp32")


def assert_close(actual: list[float], expected: list[float]) -> None:
    assert len(actual) == len(expected) == STEPS
    gaps = [abs(a - e) for a, e in zip(actual, expected, strict=True)]
    print(f"largest gap {max(gaps):.4f} at step {gaps.index(max(gaps)) + 1}, last {expected[-1]}")
    assert max(gaps) <= 0.02


@pytest.mark.gpu
def test_one_gpu_in_bf16_follows_the_cpu_in_fp32(config_file: Path, on_cpu: list[float]) -> None:
    assert_close(losses(config_file, "gpu1", 1), on_cpu)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gpus", "layout"),
    [
        # the one microbatch's gradients are exchanged in bf16, those of several are fp32 sums
        (2, "parallel.fsdp=2 train.num_microbatches=1"),
        (2, "parallel.fsdp=2 parallel.data_sharding=optim_grads_params"),
        (2, "parallel.fsdp=1 parallel.tensor=2"),
        (2, "parallel.fsdp=1 parallel.tensor=2 parallel.tp_comm_overlap=false"),
        (2, "parallel.fsdp=1 parallel.pipeline=2"),
        (4, "parallel.fsdp=4 parallel.data_sharding=optim"),
        (4, "parallel.fsdp=4 parallel.data_sharding=optim_grads_params"),
        (4, "parallel.fsdp=2 parallel.tensor=2 parallel.data_sharding=optim_grads"),
        (4, "parallel.fsdp=1 parallel.tensor=4"),
    ],
)
def test_several_gpus_in_bf16_follow_the_cpu_in_fp32(
    config_file: Path, on_cpu: list[float], gpus: int, layout: str
) -> None:
    import jax

    if len(jax.devices("gpu")) < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    name = layout.replace(" ", "_").replace("=", "")
    assert_close(losses(config_file, name, gpus, *layout.split()), on_cpu)
