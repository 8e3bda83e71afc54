"""Collectives of a lowered program, and how deep in loops they stand.

Read from StableHLO, before the compiler moves anything (compiled CPU programs also turn bf16
collectives into fp32 ones).
"""

from collections import Counter
from typing import Any

NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")


def collectives(lowered: Any) -> Counter[tuple[str, int, str]]:
    """Number of collectives by (name, loops around it, element type of its operand).

    Args:
        lowered: result of ``jax.jit(f).lower(...)``.
    """
    module = lowered.compiler_ir("stablehlo").operation
    functions = {}
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "func.func":
            functions[op.attributes["sym_name"].value] = op.operation
    found: Counter[tuple[str, int, str]] = Counter()

    def walk(op: Any, depth: int) -> None:
        name = op.name.removeprefix("stablehlo.")
        if name in NAMES:
            dtype = str(op.operands[0].type).split("x")[-1].strip("tensor<>")
            found[name, depth, dtype] += 1
        if op.name == "func.call":
            walk(functions[op.attributes["callee"].value], depth)
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    walk(inner.operation, depth + (op.name == "stablehlo.while"))

    walk(functions["main"], 0)
    return found


def count(found: Counter[tuple[str, int, str]], name: str) -> dict[int, int]:
    """``{loops around: number}`` of one collective."""
    total: Counter[int] = Counter()
    for (collective, depth, _), number in found.items():
        if collective == name:
            total[depth] += number
    return dict(total)
