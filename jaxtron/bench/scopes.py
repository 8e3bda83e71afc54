"""What each part of the model costs: kernels' time by named scope, forward and backward apart.

The trace says which instruction of the compiled step a kernel belongs to, and the step's text from
which operation of the program an instruction comes:
``jit(step)/transpose(jvp(attention))/core/dot`` is of the scope ``attention/core``
(``jax.named_scope``), in the backward pass.
"""

import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxtron.bench.breakdown import Kernel, kind_of
from jaxtron.errors import DataError

PASSES = ("forward", "backward", "recomputed", "other")
"""Recomputed: forward, once more in the backward pass. Other: not differentiated (optimizer)."""

NO_SCOPE = "without a scope"
NO_INSTRUCTION = "of no known instruction"

# With them the kernels of a CUDA graph carry no instruction (openxla/xprof issue 3070).
COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"

STEP_TEXT = "step.hlo.gz"

# What JAX puts between scopes for its own control flow and derivatives.
_STRUCTURE = re.compile(
    r"while|body|cond|scan|branch_\d+_fun|eval_jaxpr|shard_map|checkpoint|remat\d?|"
    r"rematted_computation|closed_call|core_call|custom_[jv][vj]p_call(_jaxpr)?|"
    r".*->.*"  # of jnp.einsum
)
_JITTED = frozenset({"jit", "pjit"})


def scope_of(op_name: str) -> tuple[str, str]:
    """Path of scopes, empty if there is none, and pass of an instruction's ``op_name``.

    Of an instruction that XLA made of several, ``name;name``, those of the first, or of
    ``prefix/(name:name)`` those of the most.
    """
    prefix, several, names = op_name.partition(";")[0].partition("/(")
    if several:
        found = Counter(scope_of(f"{prefix}/{name}") for name in names.rstrip(")").split(":"))
        return found.most_common(1)[0][0]
    path: dict[str, None] = {}  # a derivative by hand repeats the path it was called on
    transforms: set[str] = set()
    recomputed = False
    *above, _ = prefix.split("/")
    for part in above:
        *around, name = part.rstrip(")").split("(")
        transforms.update(around)
        if _JITTED.isdisjoint(around) and name and not _STRUCTURE.fullmatch(name):
            path[name] = None
        recomputed |= name == "rematted_computation"
    if recomputed:
        which = "recomputed"
    elif "transpose" in transforms:
        which = "backward"
    else:
        which = "forward" if "jvp" in transforms else "other"
    return "/".join(path), which


def operations(text: str) -> dict[str, str]:
    """``op_name`` of every instruction of a compiled program; empty where nothing tells it.

    An instruction without one has that of the root of the computation it calls, or of what it reads
    (a copy).
    """
    names: dict[str, str] = {}
    roots: dict[str, str] = {}  # names of computations' roots; callees come before their callers
    computation = ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = header[1]
        elif found := re.match(r"\s+(ROOT )?%?([\w.-]+) = .*? [a-z][\w-]*\(([^)]*)\)", line):
            root, instruction, operands = found.groups()
            metadata = re.search(r'op_name="([^"]*/[^"]*)"', line)  # others are of arguments
            callee = re.search(r"\bcalls=%?([\w.-]+)", line)
            name = metadata[1] if metadata else roots.get(callee[1], "") if callee else ""
            read = (names.get(operand, "") for operand in re.findall(r"%([\w.-]+)", operands))
            names[instruction] = name or next(filter(None, read), "")
            if root:
                roots[computation] = names[instruction]
    return names


@dataclass(frozen=True)
class ScopeTimes:
    """Kernels' time of one device by scope, in seconds.

    Kernels that run at once count in full, each where it belongs.

    Attributes:
        total: from the first kernel to the end of the last.
        passes: per scope, the time in each pass. Kernels of instructions without a scope are under
            ``NO_SCOPE``, those of no instruction that the text has under ``NO_INSTRUCTION``.
        communication: per scope, how much of it is communication.
        nameless: of ``NO_SCOPE`` the time by instruction, of ``NO_INSTRUCTION`` by kernel.
    """

    total: float
    passes: Mapping[str, Mapping[str, float]]
    communication: Mapping[str, float]
    nameless: Mapping[str, Mapping[str, float]]

    def _ranked(self) -> list[tuple[str, Mapping[str, float]]]:
        """Scopes by their time, the longest first; what has none comes last."""
        return sorted(
            self.passes.items(),
            key=lambda item: (item[0] in self.nameless, -sum(item[1].values())),
        )

    def _longest(self, name: str, steps: int) -> str:
        """The most of what has no scope."""
        ranked = sorted(self.nameless[name].items(), key=lambda item: -item[1])[:5]
        return f"{name}: " + ", ".join(f"{each} {1e3 * t / steps:.2f}" for each, t in ranked)

    def lines(self, steps: int) -> list[str]:
        """A table in milliseconds per step, with the sum of all kernels' time at its end.

        Below it what took longest of that without a scope.
        """
        columns = [f"{column:>9s}" for column in (*PASSES, "sum", "share", "communication")]
        width = max(map(len, (*self.passes, "all kernels")))

        def line(name: str, cells: Iterable[str]) -> str:
            sized = (f"{cell:>{len(c)}s}" for cell, c in zip(cells, columns, strict=True))
            return "  ".join([f"{name:{width}s}", *sized])

        def row(name: str, passes: Mapping[str, float], communication: float) -> str:
            total = sum(passes.values())
            cells = [f"{1e3 * passes[p] / steps:.2f}" if passes.get(p) else "-" for p in PASSES]
            cells.append(f"{1e3 * total / steps:.2f}")
            cells.append(f"{100 * total / self.total:.1f} %")
            cells.append(f"{1e3 * communication / steps:.2f}" if communication else "-")
            return line(name, cells)

        sums = {p: sum(passes.get(p, 0.0) for passes in self.passes.values()) for p in PASSES}
        return [
            line("ms of a step", columns),
            *(row(name, passes, self.communication[name]) for name, passes in self._ranked()),
            row("all kernels", sums, sum(self.communication.values())),
            "",
            *(self._longest(name, steps) for name, _ in self._ranked() if name in self.nameless),
        ]

    def to_dict(self, steps: int) -> dict[str, dict[str, float]]:
        """Per scope the milliseconds per step of each pass, their sum, and of communication."""
        return {
            name: {
                **{f"{p}_ms": 1e3 * passes.get(p, 0.0) / steps for p in PASSES},
                "sum_ms": 1e3 * sum(passes.values()) / steps,
                "communication_ms": 1e3 * self.communication[name] / steps,
            }
            for name, passes in self._ranked()
        }


def scope_times(kernels: Iterable[Kernel], text: str) -> ScopeTimes:
    """Time of one device's kernels by scope.

    Args:
        kernels: of :func:`jaxtron.bench.breakdown.device_kernels`.
        text: of the compiled step that they ran.
    """
    kernels = list(kernels)
    names = operations(text)
    passes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    communication: dict[str, float] = defaultdict(float)
    nameless: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for kernel in kernels:
        length = kernel.end - kernel.start
        scope, which = NO_INSTRUCTION, "other"
        if kernel.instruction in names:
            scope, which = scope_of(names[kernel.instruction])
            if not scope:
                scope = NO_SCOPE
                nameless[scope][kernel.instruction] += length
        else:
            nameless[scope][kernel.name] += length
        passes[scope][which] += length
        communication[scope] += length * (kind_of(kernel.name) == "communication")
    total = max(k.end for k in kernels) - min(k.start for k in kernels)
    return ScopeTimes(total, passes, communication, nameless)


def save_step_text(folder: Path, text: str) -> None:
    """Keep the compiled step's text in the folder of its trace."""
    with gzip.open(folder / STEP_TEXT, "wt") as file:
        file.write(text)


def read_step_text(folder: Path) -> str:
    """What :func:`save_step_text` kept.

    Raises:
        DataError: nothing was kept.
    """
    path = folder / STEP_TEXT
    if not path.exists():
        raise DataError(
            f"{folder} holds no {STEP_TEXT}, the text of the compiled step from which --scopes "
            f"takes the scopes of a trace: take one with `bench profile --scopes --trace {folder}`"
        )
    with gzip.open(path, "rt") as file:
        return file.read()
