"""The device mesh: six named axes over all devices of the job."""

import logging
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxtron.errors import ConfigError
from jaxtron.mesh.axes import AXES

log = logging.getLogger(__name__)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arrange devices in a grid with axes ``pipeline, data, fsdp, expert, context, tensor``.

    Devices are ordered by process and then by id, and ``tensor`` is the innermost axis, so that its
    groups are neighbours on one host whenever the host's device count is a multiple of it.

    Args:
        sizes: size of every axis; the product is the number of devices used.
        devices: devices to use; default: all of the job.

    Raises:
        ConfigError: the product of the sizes is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = tuple(sizes[a] for a in AXES)
    if int(np.prod(shape)) != len(devices):
        raise ConfigError(
            f"parallel: the mesh {dict(zip(AXES, shape, strict=True))} needs {int(np.prod(shape))} "
            f"devices, the job has {len(devices)}"
        )
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    grid = np.array(ordered).reshape(shape)
    crossing = sum(len(set(map(host_of, row))) > 1 for row in grid.reshape(-1, shape[-1]))
    if crossing:
        log.warning(
            "parallel.tensor=%d: %d tensor groups span several hosts; tensor-parallel "
            "collectives will use the network between them",
            sizes["tensor"],
            crossing,
        )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def host_of(device: jax.Device) -> int:
    """A number that devices of one host share, whatever processes have them.

    XLA counts GPUs' hosts, or groups of hosts that NVLink joins, as slices; elsewhere a process is
    taken for a host.
    """
    index: int = getattr(device, "slice_index", device.process_index)
    return index


def process_axis(mesh: Mesh) -> str | None:
    """The one mesh axis along which the devices of each process lie, all of them.

    None: a process has a single device, or devices along several axes.
    """
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    for n, name in enumerate(mesh.axis_names):
        rows = np.moveaxis(owners, n, -1).reshape(-1, mesh.shape[name])
        alone = len(np.unique(owners)) == len(rows)  # no two rows are of one process
        if mesh.shape[name] > 1 and alone and np.all(rows == rows[:, :1]):
            return str(name)
    return None


def within_host(mesh: Mesh, axes: Sequence[str]) -> bool:
    """Whether the devices along ``axes``, the other coordinates alike, are of one host."""
    order = [n for n, name in enumerate(mesh.axis_names) if name not in axes]
    order += [n for n, name in enumerate(mesh.axis_names) if name in axes]
    members = int(np.prod([mesh.shape[axis] for axis in axes], initial=1))
    groups = np.transpose(mesh.devices, order).reshape(-1, members)
    return all(len(set(map(host_of, group))) == 1 for group in groups)
