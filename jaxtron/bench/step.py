"""Time whole optimizer steps of a configuration on random tokens."""

import dataclasses
import json
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtron.config.config import Config
from jaxtron.observe.hardware import memory_figures, peak_tflops
from jaxtron.observe.throughput import Throughput
from jaxtron.program import Program


@dataclasses.dataclass(frozen=True)
class StepTiming:
    """What a benchmark of one configuration measured.

    Attributes:
        name: of the case.
        step_time_s: median seconds of a whole optimizer step.
        step_times_s: every timed step.
        tokens_per_s_per_gpu: at the median.
        tflops_per_gpu: causal attention counted (Megatron's present formula).
        tflops_per_gpu_full_attention: the older convention.
        mfu: causal TFLOP/s over the card's dense bf16 peak; None on an unknown device.
        memory_peak_bytes: fullest device; None where it is not counted.
        compile_s: from call to the end of the first step.
        loss: of the last timed step.
        grad_norm: of the first step.
        layout: mesh axes above 1 and how state is sharded.
        microbatches: per step.
        attention: kernel.
        device: device kind, and how many.
        versions: of Python and libraries.
        xla_flags: as the process saw them.
    """

    name: str
    step_time_s: float
    step_times_s: list[float]
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    tflops_per_gpu_full_attention: float
    mfu: float | None
    memory_peak_bytes: int | None
    compile_s: float
    loss: float
    grad_norm: float
    layout: dict[str, Any]
    microbatches: int
    attention: str
    device: str
    versions: dict[str, str]
    xla_flags: str

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def line(self) -> str:
        """One line for people."""
        mfu = "" if self.mfu is None else f" MFU {100 * self.mfu:4.1f}%"
        memory = self.memory_peak_bytes
        peak = "" if memory is None else f" peak {memory / 2**30:.1f} GiB"
        spread = (max(self.step_times_s) - min(self.step_times_s)) / self.step_time_s
        return (
            f"{self.name:32s} {self.step_time_s * 1e3:8.1f} ms (spread {100 * spread:.1f}%) "
            f"{self.tokens_per_s_per_gpu:8.0f} tok/s/GPU {self.tflops_per_gpu:6.1f} TF/s/GPU"
            f"{mfu}{peak} compile {self.compile_s:.0f} s loss {self.loss:.4f} "
            f"grad_norm {self.grad_norm:.4f}"
        )


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


def time_step(
    config: Config,
    *,
    name: str,
    steps: int,
    warmup: int,
    xla_flags: str,
    trace: Path | None = None,
    traced_steps: int = 2,
) -> StepTiming:
    """Compile, warm up and time ``steps`` optimizer steps, each waited for.

    Args:
        config: what to run; its data source is not read.
        name: of the case.
        steps: timed steps.
        warmup: steps after compilation that are not counted.
        xla_flags: to record.
        trace: folder for a profile of ``traced_steps`` more steps, taken after the timing.
        traced_steps: how many.
    """
    program = Program(config)
    rows = program.placement.rows
    batch = program.place({k: v[rows] for k, v in random_batch(config).items()})
    state = jax.block_until_ready(program.init_state())
    began = time.perf_counter()
    state, metrics = program.train_step(state, batch)
    jax.block_until_ready(state)
    compile_s = time.perf_counter() - began
    grad_norm = float(metrics["grad_norm"])
    for _ in range(warmup):
        state, metrics = program.train_step(state, batch)
    jax.block_until_ready(state)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        state, metrics = program.train_step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - began)
    if trace is not None:
        with jax.profiler.trace(str(trace)):
            for _ in range(traced_steps):
                state, metrics = program.train_step(state, batch)
            jax.block_until_ready((state, metrics))
    median = statistics.median(times)
    devices = list(program.mesh.devices.flat)
    throughput = Throughput.of(config.model, config.data.seq_length, config.observe.peak_tflops)
    tokens = config.train.global_batch_size * config.data.seq_length
    rates = throughput.rates(tokens, median)
    layout: dict[str, Any] = {a: n for a, n in program.sizes.items() if n > 1}
    layout["data_sharding"] = config.parallel.data_sharding
    layout["sequence_parallel"] = program.region.sequence_parallel
    layout["recompute"] = config.train.recompute
    layout["layer_loop"] = "unroll" if program.plan.unroll else "scan"
    return StepTiming(
        name=name,
        step_time_s=median,
        step_times_s=times,
        tokens_per_s_per_gpu=float(rates["tokens_per_s_per_gpu"] or 0),
        tflops_per_gpu=float(rates["tflops_per_gpu"] or 0),
        tflops_per_gpu_full_attention=float(rates["tflops_per_gpu_full_attention"] or 0),
        mfu=rates["mfu"],
        memory_peak_bytes=memory_figures(devices)["memory_peak_bytes"],
        compile_s=compile_s,
        loss=float(metrics["loss"]),
        grad_norm=grad_norm,
        layout=layout,
        microbatches=program.batch_layout.num_microbatches,
        attention=program.attention_backend.name,
        device=f"{len(devices)} x {devices[0].device_kind}"
        + ("" if peak_tflops(devices[0].device_kind) else " (peak unknown)"),
        versions={
            "python": platform.python_version(),
            **{lib: version(lib) for lib in ("jax", "jaxlib", "flax", "optax")},
        },
        xla_flags=xla_flags,
    )
