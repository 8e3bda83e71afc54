"""The product of pipelines with the other axes (O10).

``python -m tests.parity.pipeline_arms 8-1f1b-tensor2-odd ...`` compares arms with one device; for
those that need more than eight.
"""

import itertools
import sys
from typing import Any

import jax

from tests.parity.context_arms import devices_of
from tests.parity.harness import assert_parity, reference, run

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"pipeline_schedule": "gpipe"},
    "interleaved": {"pipeline_schedule": "interleaved", "virtual_pipeline": 2},
}
OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tensor2": {"tensor": 2},
    "fsdp2": {"fsdp": 2},
    "data2": {"data": 2},
    "data2-tensor2": {"data": 2, "tensor": 2},
}
COUNTS = ("p", "4p", "odd")

Arm = tuple[int, str, str, str]
ARMS: list[Arm] = [
    arm
    for arm in itertools.product((2, 4, 8), SCHEDULES, OTHERS, COUNTS)
    # interleaving goes by groups of p microbatches
    if not (arm[1] == "interleaved" and arm[3] == "odd")
]


def parallel_of(stages: int, schedule: str, other: str) -> dict[str, Any]:
    """The layout of an arm."""
    return {"pipeline": stages, **SCHEDULES[schedule], **OTHERS[other]}


def check_arm(stages: int, schedule: str, other: str, count: str) -> None:
    """PARITY of an arm with one device."""
    m = {"p": stages, "4p": 4 * stages, "odd": 2 * stages + 1}[count]
    rows = m * (4 if "data2" in other or other == "fsdp2" else 2)
    raw: dict[str, Any] = {
        # 8 stages x tensor 2 split the vocabulary in 16
        "model": {"num_layers": 2 * stages, "make_vocab_size_divisible_by": max(8, 2 * stages)},
        "train": {"num_microbatches": m, "global_batch_size": rows},
    }
    parallel = parallel_of(stages, schedule, other)
    devices = jax.devices()[: devices_of(parallel)]
    assert_parity(run(parallel, devices, **raw), reference(**raw))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        [found] = [each for each in ARMS if "-".join(map(str, each)) == name]
        check_arm(*found)
        print(name, "equals one device", flush=True)
