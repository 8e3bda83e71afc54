"""The GPUs that this process sees, asked without touching JAX."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class VisibleGpus:
    """Number of GPUs and their compute capability (``9.0``; None: unknown or mixed)."""

    count: int = 0
    compute_capability: str | None = None


def visible_gpus(env: Mapping[str, str]) -> VisibleGpus:
    """GPUs that JAX will find: none when JAX_PLATFORMS leaves them out.

    ``CUDA_VISIBLE_DEVICES`` decides the number where it is set; else ``nvidia-smi``, which knows of
    the limits that a scheduler put on the process; else the device files.
    """
    platforms = env.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.lower().split(",")):
        return VisibleGpus()
    capabilities = _ask_driver()
    if "CUDA_VISIBLE_DEVICES" in env:
        count = _listed(env["CUDA_VISIBLE_DEVICES"])
    elif capabilities:
        count = len(capabilities)
    else:
        count = sum(1 for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal())
    same = len(set(capabilities)) == 1
    return VisibleGpus(count, capabilities[0] if count and same else None)


def _listed(value: str) -> int:
    """Devices in CUDA_VISIBLE_DEVICES: CUDA stops reading at the first entry that is none."""
    count = 0
    for entry in value.split(","):
        if not re.fullmatch(r"\d+|GPU-\S+|MIG-\S+", entry.strip()):
            break
        count += 1
    return count


def _ask_driver() -> list[str]:
    """Compute capability of every GPU that nvidia-smi lists; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
