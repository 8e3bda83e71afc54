"""Arms of parity over the ``context`` axis; also runs some by name, for more than eight devices.

``python -m tests.parity.context_arms NAME ...`` with enough fake devices in ``XLA_FLAGS``.
"""

import itertools
import math
import sys
from typing import Any

import jax

from tests.parity.harness import assert_parity, reference, run

PACKED = {"eod_token": 0, "reset_attention_mask": True, "reset_position_ids": True}
# As many groups as heads, which leaves some to exchange on every layout of eight members.
HEADS = {"num_query_groups": 8}
SIXTEEN_HEADS = {"num_attention_heads": 16, "num_query_groups": 16}


# Four axes at once, on 16 devices.
FOUR_AXES: dict[str, dict[str, Any]] = {
    "tensor2-pipeline2-context2-fsdp2": {
        "parallel": {"tensor": 2, "pipeline": 2, "context": 2, "fsdp": 2},
        "data": PACKED,
        "train": {"num_microbatches": 4},
    }
}


def product() -> dict[str, dict[str, Any]]:
    """{2, 4, 8} x strategies x {alone, tensor 2, fsdp 2, data 2, pipeline 2} x {plain, packed}.

    A ring does not go with a pipeline. On four members also packed rows whose documents are cut
    by themselves.
    """
    strategies = ("all_gather", "ring", "all_to_all", "hierarchical")
    others = ({}, {"tensor": 2}, {"fsdp": 2}, {"data": 2}, {"pipeline": 2})
    arms = {}
    for context, strategy, other, rows in itertools.product(
        (2, 4, 8), strategies, others, ("", "-packed", "-cut")
    ):
        if strategy == "hierarchical" and context == 2:
            continue  # has no two groups of two
        if strategy in ("ring", "hierarchical") and "pipeline" in other:
            continue
        name = "-".join([f"context{context}", strategy, *(f"{a}{n}" for a, n in other.items())])
        parallel = {"context": context, "context_strategy": strategy, **other}
        if strategy == "hierarchical":
            parallel["context_all_to_all"] = 2
        if rows == "-cut":
            if strategy == "all_to_all" or context != 4:
                continue
            parallel["context_cut_documents"] = 3
        many = strategy == "all_to_all" and context * other.get("tensor", 1) > 8
        arms[name + rows] = {
            "parallel": parallel,
            "model": SIXTEEN_HEADS if many else HEADS,
            "data": PACKED if rows else {},
            "train": {"num_microbatches": 2},
        }
    return arms


def devices_of(parallel: dict[str, Any]) -> int:
    """Devices that a layout takes."""
    return math.prod(parallel.get(a, 1) for a in ("pipeline", "data", "fsdp", "context", "tensor"))


def check_arm(parallel: dict[str, Any], **raw: Any) -> None:
    """PARITY of a layout with one device."""
    devices = jax.devices()[: devices_of(parallel)]
    assert_parity(run(parallel, devices, **raw), reference(**raw))


if __name__ == "__main__":
    arms = product() | FOUR_AXES
    for name in sys.argv[1:]:
        check_arm(**arms[name])
        print(name, "equals one device", flush=True)
