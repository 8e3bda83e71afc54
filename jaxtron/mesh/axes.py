"""The six mesh axes and their sizes.

Sizes come from ``parallel.*`` and the number of devices alone, so the layout of any job can be
worked out on any machine, without JAX.
"""

import math

from jaxtron.errors import ConfigError
from jaxtron.parallel.config import ParallelConfig

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes, outermost (slowest link) to innermost (fastest link)."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Axes over which the rows of a batch are split."""


def resolve_axes(parallel: ParallelConfig, num_devices: int) -> dict[str, int]:
    """Sizes of all six axes, in the order of :data:`AXES`.

    An axis given as -1 takes the devices that the other axes leave.

    Args:
        parallel: the axis sizes asked for.
        num_devices: devices of the whole job.

    Raises:
        ConfigError: an axis is 0 or below -1, more than one is -1, or the product of the axes is
            not the number of devices.
    """
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    invalid = [axis for axis, size in sizes.items() if size == 0 or size < -1]
    if invalid:
        values = ", ".join(f"parallel.{axis} is {sizes[axis]}" for axis in invalid)
        raise ConfigError(f"{values}: an axis has 1 device or more (-1 on one axis: what is left)")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        names = " and ".join(f"parallel.{axis}" for axis in open_axes)
        raise ConfigError(
            f"{names} are -1, but only one axis can take what is left: give the others a size"
        )
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    product = math.prod(fixed.values())
    shown = " × ".join(f"{axis} {size}" for axis, size in fixed.items() if size > 1) or "all axes 1"
    if open_axes:
        if num_devices % product:
            raise ConfigError(
                f"parallel: {shown} = {product} devices does not divide the job's {num_devices} "
                f"devices, so nothing whole is left for parallel.{open_axes[0]}=-1: "
                + _dividing_sizes(fixed, num_devices)
            )
        sizes[open_axes[0]] = num_devices // product
    elif product != num_devices:
        raise ConfigError(
            f"parallel: {shown} = {product} devices, but the job has {num_devices}: "
            + _filling_sizes(fixed, num_devices)
        )
    return sizes


def _dividing_sizes(fixed: dict[str, int], num_devices: int) -> str:
    """For each axis, the nearest sizes that would divide the devices if it alone changed."""
    product = math.prod(fixed.values())
    fixes = []
    for axis, size in fixed.items():
        others = product // size
        if size == 1 or num_devices % others:
            continue
        room = num_devices // others
        divisors = [d for d in range(1, room + 1) if room % d == 0]
        nearest = [max(d for d in divisors if d < size), *(d for d in divisors if d > size)][:2]
        fixes.append(f"set parallel.{axis} to {' or '.join(map(str, nearest))}")
    return ", or ".join([*fixes, f"start on a multiple of {product} devices"])


def _filling_sizes(fixed: dict[str, int], num_devices: int) -> str:
    """The data-parallel size that would use exactly the devices there are."""
    product = math.prod(fixed.values())
    fixes = []
    for axis in ("fsdp", "data"):
        others = product // fixed[axis]
        if num_devices % others == 0:
            fixes.append(f"set parallel.{axis} to {num_devices // others}")
            break
    return ", or ".join([*fixes, f"start on {product} devices"])
