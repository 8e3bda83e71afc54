"""Compiler flags: a table by GPU and JAX version, and how it combines with the user's flags.

A row stands here only while a measurement says that it helps, or where its text says so a compiled
step; without one XLA's own default holds.
"""

import difflib
import mmap
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jaxlib

from jaxtron.errors import ConfigError

FlagValue = str | int | float | bool | None


@dataclass(frozen=True)
class FlagRow:
    """One flag, where it applies, and the measurement that justifies it.

    Attributes:
        compute_capability: of the GPU (``9.0``: H100, H200).
        jax: release series of JAX (``0.11``) that it was measured with.
        name: flag without dashes.
        value: as XLA reads it.
        measured: what was seen.
        steps: the training steps that it is for, given as one is compiled; None: for the whole
            process.
        compiled: release series whose compiled steps change by it as the measured one's do. Nothing
            was timed with them. What shows only as a step runs has none.
    """

    compute_capability: str
    jax: str
    name: str
    value: str
    measured: str
    steps: "StepKind | None" = None
    compiled: tuple[str, ...] = ()


StepKind = Literal["branching", "exchange", "permutations", "parts"]
"""Training steps of a pipeline whose stages take branches (several chunks, uneven stages); those
that exchange parts within a process (``parallel/exchange.py``); those that send by permutations:
keys and values around a ring, or parts of a sequence to tensor-parallel blocks
(``parallel/tensor_parts.py``); and of the latter those with more than two parts."""

AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
COPIES = "xla_gpu_use_memcpy_local_p2p"
PERMUTATIONS = "xla_gpu_collective_permute_mode"

TABLE: tuple[FlagRow, ...] = (
    FlagRow(
        compute_capability="9.0",
        jax="0.11",
        name="xla_gpu_enable_triton_gemm",
        value="false",
        measured="8 Llama-3-8B layers, bf16, JAX 0.11.2: one H100 522 -> 542 TFLOP/s, one H200 "
        "568 -> 590",
        compiled=("0.12",),
    ),
    FlagRow(
        compute_capability="9.0",
        jax="0.11",
        name="xla_gpu_dot_merger_threshold_mb",
        value="0",  # by itself XLA joins small products of one array, and copies for it
        measured="8 Llama-3-8B layers, bf16, micro-batch 1, one H200, JAX 0.11.2: 1393.7 -> 1371.8 "
        "ms; 8 Qwen3-30B layers: 484.1 -> 481.3 ms",
        compiled=("0.12",),
    ),
    FlagRow(
        compute_capability="9.0",
        jax="0.11",
        name=AT_ONCE,
        value="4",
        measured="pipeline 2 with 2 chunks of 2 layers, two H200, JAX 0.11.2: 1517 -> 1507 ms; "
        "tensor 2 with two microbatches at once: 736 -> 741 ms with a limit of 2",
        steps="branching",
        compiled=("0.12",),
    ),
    FlagRow(
        compute_capability="9.0",
        jax="0.11",
        name=COPIES,
        value="true",
        measured="two H200, bf16, JAX 0.11.2: 8 Llama-3-8B layers, fsdp 2, 4 sequences a GPU 353 "
        "-> 349 ms; 4 Mixtral layers, expert 2 by alltoall 694 -> 683 ms",
        steps="exchange",
    ),
    FlagRow(
        compute_capability="9.0",
        jax="0.11",
        name=PERMUTATIONS,
        value="peer",
        measured="two H200, bf16, JAX 0.11.2: 8 Llama-3-8B layers, tensor 2 in parts 727.8 -> "
        "692.7 ms; 4 layers, ring of 2, 65,536 tokens 6814.9 -> 6784.1 ms",
        steps="permutations",
    ),
    FlagRow(
        compute_capability="9.0",
        jax="0.11",
        name=AT_ONCE,
        value="4",
        measured="tensor 2 in parts, two H200, JAX 0.11.2: 692.7 -> 693.4 ms; compiled for four "
        "H100s, tensor 4: of a microbatch's 204 permutations 57 -> 6 with no product beside them",
        steps="parts",
    ),
)


DETERMINISTIC: Mapping[str, str] = {
    # Kernels without atomic additions; none are timed.
    "xla_gpu_deterministic_ops": "true",
    "xla_gpu_exclude_nondeterministic_ops": "true",
    "xla_gpu_autotune_level": "0",
}
"""What ``runtime.deterministic`` sets (XLA's docs/determinism.md)."""


def with_determinism(overrides: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    """``runtime.xla_flags`` together with :data:`DETERMINISTIC`.

    Raises:
        ConfigError: they contradict each other.
    """
    given = {_flag_name(name): value for name, value in overrides.items()}
    for name, value in DETERMINISTIC.items():
        if name in given and _text(given[name]) != value:
            raise ConfigError(
                f"runtime.xla_flags.{name} is {given[name]}, but runtime.deterministic needs "
                f"{value}: remove the flag, or set runtime.deterministic to false"
            )
    return {**given, **DETERMINISTIC}


def table_rows(compute_capability: str | None, jax_version: str) -> tuple[FlagRow, ...]:
    """Rows for a process on a GPU and a JAX version; none for a CPU or a GPU not measured."""
    return tuple(row for row in _rows(compute_capability, jax_version) if row.steps is None)


def unmeasured(compute_capability: str | None, jax_version: str) -> str | None:
    """What a user should know who has GPUs, or a JAX, that the table was not measured with.

    Args:
        compute_capability: of the GPUs, None for CPUs.
        jax_version: as JAX tells it.

    Returns:
        the text of a warning; None: measured, or no GPUs.
    """
    if compute_capability is None:
        return None
    table = [row for row in TABLE if row.compute_capability == compute_capability]
    if not table:
        return (
            f"no compiler flags were measured on GPUs of compute capability {compute_capability}: "
            "XLA's defaults hold (runtime.xla_flags sets others)"
        )
    series = sorted({row.jax for row in table})
    if _series(jax_version) in series:
        return None
    left = [row for row in table if row not in _rows(compute_capability, jax_version)]
    names = ", ".join(dict.fromkeys(row.name for row in left))
    return (
        f"the table of compiler flags for these GPUs was measured with JAX {' and '.join(series)}, "
        f"not with {jax_version}: XLA's defaults hold for {names}, so steps can be slower than "
        f"docs/performance.md says. Install jax=={series[-1]}.*, or set what you measured as "
        "faster in runtime.xla_flags"
    )


def step_flags(
    compute_capability: str | None,
    jax_version: str,
    environment: str,
    kinds: Collection[StepKind],
) -> dict[str, str]:
    """Flags to compile a training step with, besides those of the process.

    Args:
        compute_capability: of the GPU, None for a CPU.
        jax_version: as JAX tells it.
        environment: value of ``XLA_FLAGS``; what stands there (``runtime.xla_flags`` does)
            counts before the table.
        kinds: what the step is.
    """
    chosen = {_word_name(word) for word in environment.split()}
    return {
        row.name: row.value
        for row in _rows(compute_capability, jax_version)
        if row.steps in kinds and row.name not in chosen
    }


def compiler_options(flags: Mapping[str, str]) -> dict[str, str | bool]:
    """Flags as ``jax.jit`` takes them: what XLA reads in ``XLA_FLAGS`` it may refuse there."""
    forms: Mapping[str, str | bool] = {
        "true": True,
        "false": False,
        "peer": "COLLECTIVES_PEER_MEMORY",
    }
    return {name: forms.get(value, value) for name, value in flags.items()}


def copies_permutations(compute_capability: str | None, jax_version: str, environment: str) -> bool:
    """Whether copy engines do a step's permutations within a process, not NCCL.

    Args:
        compute_capability: of the GPU, None for a CPU.
        jax_version: as JAX tells it.
        environment: value of ``XLA_FLAGS``, which counts before the table.
    """
    if compute_capability is None:
        return False
    rows = _rows(compute_capability, jax_version)
    given = [word for word in environment.split() if _word_name(word) == PERMUTATIONS]
    values = [row.value for row in rows if row.name == PERMUTATIONS]
    values += [word.partition("=")[2] for word in given]
    return bool(values) and values[-1].lower() == "peer"


def _rows(compute_capability: str | None, jax_version: str) -> tuple[FlagRow, ...]:
    series = _series(jax_version)
    return tuple(
        row
        for row in TABLE
        if row.compute_capability == compute_capability and series in (row.jax, *row.compiled)
    )


def _series(jax_version: str) -> str:
    return ".".join(jax_version.split(".")[:2])


def combine(
    rows: tuple[FlagRow, ...], environment: str, overrides: Mapping[str, FlagValue]
) -> tuple[str, dict[str, str]]:
    """The value of ``XLA_FLAGS`` and the flags that jaxtron set in it.

    ``runtime.xla_flags`` counts before what ``XLA_FLAGS`` already holds, and that before the table.

    Args:
        rows: rows of the table that apply.
        environment: present value of ``XLA_FLAGS``; flags in it that nothing overrides stay as
            they are.
        overrides: ``runtime.xla_flags``; None drops a flag.

    Raises:
        ConfigError: a name in ``overrides`` is not that of an XLA flag.
    """
    chosen = {_flag_name(name): value for name, value in overrides.items()}
    kept = [word for word in environment.split() if _word_name(word) not in chosen]
    in_environment = {_word_name(word) for word in kept}
    ours = {row.name: row.value for row in rows if row.name not in in_environment}
    for name, value in chosen.items():
        ours.pop(name, None)
        if value is not None:
            ours[name] = _text(value)
    return " ".join([*kept, *words(ours)]), ours


def words(flags: Mapping[str, FlagValue]) -> list[str]:
    """Flags as ``XLA_FLAGS`` has them."""
    return [f"--{name}={_text(value)}" for name, value in flags.items()]


def check_known(names: Iterable[str]) -> None:
    """Refuse flags that this XLA does not have; it would end the process with its whole usage.

    XLA lists its flags nowhere that Python can read, but their names are strings in its library, to
    be found in a hundredth of a second. One that is not there, which takes half a second, is none.

    Args:
        names: of flags, as ``runtime.xla_flags`` has them.

    Raises:
        ConfigError: with the nearest names.
    """
    library = Path(jaxlib.__file__).parent / "libjax_common.so"
    if not library.exists():  # elsewhere in another version or system: XLA itself refuses then
        return
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for name in map(_flag_name, names):
            if text.find(name.encode() + b"\0") < 0:
                known = {found.decode() for found in re.findall(rb"xla_[a-z0-9_]+(?=\0)", text)}
                close = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
                raise ConfigError(
                    f"runtime.xla_flags.{name}: XLA of jaxlib {jaxlib.__version__} has no such "
                    f"flag; the nearest are {', '.join(close)}"
                )


def _text(value: FlagValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _word_name(word: str) -> str:
    return word.lstrip("-").partition("=")[0]


def _flag_name(name: str) -> str:
    bare = name.lstrip("-")
    if not bare.startswith("xla_") or not bare.replace("_", "").isalnum():
        raise ConfigError(
            f"runtime.xla_flags.{name}: not the name of an XLA flag; they begin with xla_, "
            "for example xla_gpu_enable_triton_gemm: false"
        )
    return bare
