"""Configuration of the process and its devices: how the job starts."""

from typing import Literal

from jaxtron.config.fields import key, section


@section
class RuntimeConfig:
    """Devices, compiler flags and the meeting of the processes of a job."""

    cpu_devices: int | None = key(
        None,
        "Run on this many fake CPU devices a process; null: on the GPUs (or the one CPU).",
        ge=1,
    )
    xla_flags: dict[str, str | int | float | bool | None] = key(
        {},
        "Compiler flags, name -> value, over those of the built-in table and of XLA_FLAGS; "
        "null drops a flag.",
    )
    deterministic: bool = key(
        False,
        "The same bits in every run of the same job on the same machines: on GPUs only "
        "deterministic kernels, chosen without timing them.",
    )
    gpu_memory_fraction: float | None = key(
        0.92,
        "Share of each GPU's memory that JAX reserves at the start, unless "
        "XLA_PYTHON_CLIENT_MEM_FRACTION is set; the rest is for NCCL and the driver. null: JAX's "
        "setting (0.75).",
        gt=0,
        le=1,
    )
    matmul_precision: Literal["default", "high", "highest"] | None = key(
        None, "Precision of fp32 matrix products (highest: no TF32); null: JAX's setting."
    )
    compilation_cache_dir: str | None = key(
        None, "Folder that keeps compiled programs between runs; null: JAX's setting (off)."
    )
    coordinator_address: str | None = key(
        None, "host:port of process 0; null: from SLURM, else a single process."
    )
    num_processes: int | None = key(
        None, "Processes of the whole job; null: from SLURM, else 1.", ge=1
    )
    process_id: int | None = key(
        None, "Number of this process, from 0; null: from SLURM, else 0.", ge=0
    )
    local_device_ids: list[int] | None = key(
        None, "GPUs of this process, numbered among the visible ones; null: by tasks per node."
    )
    initialization_timeout_s: int = key(
        300, "Longest wait for the other processes at the start [seconds].", ge=1
    )
    heartbeat_timeout_s: int = key(
        100, "A process that is silent for this long counts as lost: the job ends [seconds].", ge=1
    )
    stall_timeout_s: int | None = key(
        1800,
        "Several processes: one whose loop does not get on for this long (reading, compiling, a "
        "step, a batch of an evaluation) ends, and says which process it waited for [seconds]; "
        "null: it waits on.",
        ge=1,
    )
