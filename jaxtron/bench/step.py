"""Time whole optimizer steps of a configuration on random tokens."""

import dataclasses
import itertools
import platform
import re
import statistics
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtron.bench.scopes import save_step_text
from jaxtron.config.config import Config
from jaxtron.data.packing import packed_row
from jaxtron.dynamic_program import DynamicProgram
from jaxtron.launch.xla_flags import words
from jaxtron.observe.flops import mean_causal_keys
from jaxtron.observe.hardware import memory_figures, peak_fp8_tflops, peak_tflops
from jaxtron.observe.kernels import kernels_of
from jaxtron.observe.throughput import Keys, Throughput
from jaxtron.parallel.context.dynamic import dynamic_context
from jaxtron.program import Program
from jaxtron.room import check_state, check_step

NVIDIA_LIBRARIES = re.compile(r"nvidia-(cublas|cuda-runtime|cudnn|nccl)(-cu\d+)?")


@dataclasses.dataclass(frozen=True)
class StepTiming:
    """What a benchmark of one configuration measured.

    Attributes:
        name: of the case.
        step_time_s: median seconds of a whole optimizer step.
        spread: longest less shortest timed step, as a share of the median.
        step_times_s: every timed step.
        tokens_per_s_per_gpu: at the median.
        tflops_per_gpu: causal attention counted (Megatron's present formula).
        tflops_per_gpu_full_attention: the older convention.
        mfu: causal TFLOP/s over the card's dense bf16 peak; None on an unknown device.
        mfu_fp8: the same over its dense FP8 peak; None too where nothing is in FP8.
        memory_peak_bytes: fullest device; None where it is not counted.
        compile_s: from call to the end of the first step.
        loss: of the last timed step.
        grad_norm: of the first step.
        layout: mesh axes above 1 and how state is sharded.
        microbatches: per step; None: a scheduler makes them (``parallel.dynamic_context``).
        kernels: who computes attention and the matrix products, and the loss's chunks.
        device: device kind, and how many.
        versions: of Python, JAX's libraries, and CUDA's where there are GPUs.
        xla_flags: as the process saw them.
    """

    name: str
    step_time_s: float
    spread: float
    step_times_s: list[float]
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    tflops_per_gpu_full_attention: float
    mfu: float | None
    mfu_fp8: float | None
    memory_peak_bytes: int | None
    compile_s: float
    loss: float
    grad_norm: float
    layout: dict[str, Any]
    microbatches: int | None
    kernels: dict[str, str]
    device: str
    versions: dict[str, str]
    xla_flags: str

    def line(self) -> str:
        """One line for people."""
        mfu = "" if self.mfu is None else f" MFU {100 * self.mfu:4.1f}%"
        if self.mfu_fp8 is not None:
            mfu += f" ({100 * self.mfu_fp8:.1f}% of FP8)"
        memory = self.memory_peak_bytes
        peak = "" if memory is None else f" peak {memory / 2**30:.1f} GiB"
        return (
            f"{self.name:32s} {self.step_time_s * 1e3:8.1f} ms (spread {100 * self.spread:.1f}%) "
            f"{self.tokens_per_s_per_gpu:8.0f} tok/s/GPU {self.tflops_per_gpu:6.1f} TF/s/GPU "
            f"({self.tflops_per_gpu_full_attention:.1f} full attention)"
            f"{mfu}{peak} compile {self.compile_s:.0f} s loss {self.loss:.4f} "
            f"grad_norm {self.grad_norm:.4f}"
        )

    def circumstances(self) -> list[str]:
        """Lines for people: what was run, with what and on what."""

        def listed(entries: Mapping[str, Any]) -> str:
            return ", ".join(f"{name} {value}" for name, value in entries.items())

        count = "by documents" if self.microbatches is None else self.microbatches
        return [
            f"layout: {listed(self.layout)}, microbatches {count}",
            f"kernels: {listed(self.kernels)}",
            f"flags: {self.xla_flags or 'none'}",
            f"versions: {listed(self.versions)}; {self.device}",
        ]


def random_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """A global batch of uniformly random tokens, every one with a loss."""
    rng = np.random.default_rng(seed)
    shape = (config.train.global_batch_size, config.data.seq_length)
    tokens = rng.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), dtype=np.int32)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": np.ones(shape, np.float32),
    }


@dataclasses.dataclass(frozen=True)
class DocumentLengths:
    """A log-normal distribution of lengths, cut at the length of a row.

    Attributes:
        median: [tokens].
        sigma: standard deviation of the lengths' natural logarithm.
    """

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator, longest: int) -> int:
        """One length, from 2 to ``longest`` tokens."""
        return int(np.clip(self.median * np.exp(self.sigma * rng.normal()), 2, longest))


def document_batch(
    config: Config, lengths: DocumentLengths, seed: int, padded: bool = False
) -> tuple[dict[str, np.ndarray], list[int]]:
    """A global batch of random documents, every token with a loss, and their lengths.

    Documents are drawn until one does not fit into any row any more (first fit). With ``padded`` a
    row holds one document, and there are no numbers of documents.
    """
    rng = np.random.default_rng(seed)
    rows, seq = config.train.global_batch_size, config.data.seq_length
    members: list[list[int]] = [[] for _ in range(rows)]
    while True:
        length = lengths.draw(rng, seq)
        fitting = [row for row in members if (not row if padded else sum(row) + length <= seq)]
        if not fitting:
            break
        fitting[0].append(length)

    def document(length: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = rng.integers(0, config.model.vocab_size, length + 1, dtype=np.int32)
        return tokens, np.ones(length + 1, bool)

    packed = [packed_row([document(n) for n in row], seq) for row in members]
    names = ("tokens", "labels", "loss_mask") if padded else tuple(packed[0])
    batch = {name: np.stack([row[name] for row in packed]) for name in names}
    return batch, [n for row in members for n in row]


def keys_of(config: Config, lengths: list[int]) -> Keys:
    """Keys that the tokens of documents meet."""
    window = config.model.window_size
    causal = sum(n * mean_causal_keys(n, window) for n in lengths)
    return Keys(causal, float(sum(n * n for n in lengths)))


def time_step(
    config: Config,
    *,
    name: str,
    steps: int,
    warmup: int,
    xla_flags: str,
    trace: Path | None = None,
    traced_steps: int = 2,
    lengths: DocumentLengths | None = None,
    padded: bool = False,
) -> StepTiming:
    """Compile, warm up and time ``steps`` optimizer steps, each waited for.

    Args:
        config: what to run; its data source is not read.
        name: of the case.
        steps: timed steps.
        warmup: steps after compilation that are not counted.
        xla_flags: to record.
        trace: folder for a profile of ``traced_steps`` more steps, taken after the timing; the
            compiled step's text goes there too, unless it is of several executables.
        traced_steps: how many.
        lengths: of documents: every step has others, and rates are those of all timed steps
            together, over real tokens. None: whole rows of random tokens.
        padded: one document a row.
    """
    if trace is not None:  # a program of the compilation cache may have the names of older code
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    program = Program(config)
    stage = dynamic_context(config, program.sizes)
    trained: Any = program if stage is None else DynamicProgram(program, stage)
    rows = program.placement.rows
    seeds = itertools.count()
    drawn: list[int] = []

    def placed() -> Any:
        if lengths is None:
            batch = random_batch(config)
        else:
            batch, drawn[:] = document_batch(config, lengths, next(seeds), padded)
        if stage is not None:
            return trained.place(stage(batch))
        return program.place({k: v[rows] for k, v in batch.items()})

    check_state(program)
    state = jax.block_until_ready(program.init_state())
    batch = placed()
    began = time.perf_counter()
    check_step(program, trained.step_bytes(state, batch))
    state, metrics = trained.train_step(state, batch)
    jax.block_until_ready(state)
    compile_s = time.perf_counter() - began
    grad_norm = float(metrics["grad_norm"])
    for _ in range(warmup):
        batch = placed() if lengths is not None else batch
        state, metrics = trained.train_step(state, batch)
    jax.block_until_ready(state)
    times, documents = [], []
    for _ in range(steps):
        batch = jax.block_until_ready(placed()) if lengths is not None else batch
        documents += drawn
        began = time.perf_counter()
        state, metrics = trained.train_step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - began)
    if trace is not None:
        step = trained.train_step
        if stage is None:  # the very executable whose text is kept
            step = program.train_step.lower(state, batch).compile()
        with jax.profiler.trace(str(trace)):
            for _ in range(traced_steps):
                state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
        if stage is None and jax.process_index() == 0:
            save_step_text(trace, step.as_text())
    median = statistics.median(times)
    devices = list(program.mesh.devices.flat)
    own = [device for device in devices if device.process_index == jax.process_index()]
    # of all processes: each sees its own devices' counts
    peaks = multihost_utils.process_allgather(memory_figures(own)["memory_peak_bytes"] or 0)
    throughput = Throughput.of(config.model, config.data.seq_length, config.observe.peak_tflops)
    tokens = config.train.global_batch_size * config.data.seq_length
    rates = throughput.rates(tokens, median)
    if lengths is not None:
        rates = throughput.rates(sum(documents), sum(times), keys_of(config, documents))
    layout: dict[str, Any] = {a: n for a, n in program.sizes.items() if n > 1}
    layout["data_sharding"] = config.parallel.data_sharding
    layout["sequence_parallel"] = program.region.sequence_parallel
    layout["recompute"] = config.train.recompute
    layout["layer_loop"] = "unroll" if program.plan.unroll else "scan"
    kind = devices[0].device_kind
    fp8_peak = None if config.precision.fp8 is None else peak_fp8_tflops(kind)
    return StepTiming(
        name=name,
        step_time_s=median,
        spread=(max(times) - min(times)) / median,
        step_times_s=times,
        tokens_per_s_per_gpu=float(rates["tokens_per_s_per_gpu"] or 0),
        tflops_per_gpu=float(rates["tflops_per_gpu"] or 0),
        tflops_per_gpu_full_attention=float(rates["tflops_per_gpu_full_attention"] or 0),
        mfu=rates["mfu"],
        mfu_fp8=None if fp8_peak is None else float(rates["tflops_per_gpu"] or 0) / fp8_peak,
        memory_peak_bytes=int(np.max(peaks)) or None,
        compile_s=compile_s,
        loss=float(metrics["loss"]),
        grad_norm=grad_norm,
        layout=layout,
        microbatches=None if stage is not None else program.batch_layout.num_microbatches,
        kernels=kernels_of(program),
        device=f"{len(devices)} x {kind}" + ("" if peak_tflops(kind) else " (peak unknown)"),
        versions=versions(devices[0].platform),
        xla_flags=" ".join([xla_flags, *words(program.step_flags)]).strip(),
    )


def versions(platform_name: str) -> dict[str, str]:
    """Versions of what a step's speed depends on.

    Args:
        platform_name: of the devices; ``cpu`` has no CUDA libraries and no driver.
    """
    found = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")},
    }
    if platform_name == "cpu":
        return found
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and NVIDIA_LIBRARIES.fullmatch(name):
            found[name.removeprefix("nvidia-")] = distribution.version
    driver = Path("/sys/module/nvidia/version")
    if driver.exists():
        found["driver"] = driver.read_text().strip()
    return found
