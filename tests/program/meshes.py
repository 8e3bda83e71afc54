"""Meshes of several processes, of devices that know no more than their process."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxtron.mesh.axes import AXES


def mesh_of(per_process: int, **sizes: int) -> Any:
    """A mesh whose devices know their process, as far as the functions under test look at it."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = np.empty(int(np.prod(shape)), object)
    for n in range(devices.size):
        devices[n] = SimpleNamespace(process_index=n // per_process)
    return SimpleNamespace(
        axis_names=AXES, devices=devices.reshape(shape), shape=dict(zip(AXES, shape, strict=True))
    )
