"""How tokens reach the devices that hold their experts, and how results come back.

A dispatcher is a function ``(x, experts, weights, run, plan) -> y`` of this device's tokens
``x [N, h]``, their choices ``experts [N, k]`` (``num_experts``: none) and the choices' weights
``[N, k]``; ``run`` applies this device's experts to rows grouped by expert. All dispatchers return
the same ``y[n] = sum_j weights[n, j] expert_{experts[n, j]}(x[n])``. Shapes are static: buffers
hold the most that can come, and nothing waits for the host. Their collectives run over the mesh
axes that split the experts, whatever tokens chose, so idle experts and devices are nothing special.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.kernels.grouped_matmul_spec import RowKernels
from jaxtron.layers.moe.permute import combine_rows, group_by_expert, place_rows
from jaxtron.parallel.region import Region

RunExperts = Callable[[jax.Array, jax.Array], jax.Array]
"""``(rows [M, h], sizes [local experts]) -> [M, h]``."""


@dataclass(frozen=True)
class DispatchPlan:
    """The static side of a dispatch.

    Attributes:
        region: the manual region.
        axes: mesh axes that split the experts, major first.
        num_experts: experts of the layer, on all devices.
        most: choices that an expert accepts of one device's tokens at most; None: no limit but
            their number (dropless).
        strided: give every expert the same number of slots (needs ``most``).
        tile: otherwise experts begin at slots that are multiples of this.
        kernels: move rows to and from the slots, or None.
    """

    region: Region
    axes: tuple[str, ...]
    num_experts: int
    most: int | None
    strided: bool
    tile: int = 1
    kernels: RowKernels | None = None

    @property
    def group(self) -> int:
        """Devices that share the experts."""
        size = 1
        for axis in self.axes:
            size *= self.region.sizes[axis]
        return size

    @property
    def local_experts(self) -> int:
        """Experts on a device."""
        return self.num_experts // self.group

    def rows_from_one(self, tokens: int, topk: int) -> int:
        """Rows that a device with ``tokens`` tokens sends to one device at most."""
        rows = tokens * min(topk, self.local_experts)
        return rows if self.most is None else min(rows, self.local_experts * self.most)

    def slots(self, tokens: int, topk: int) -> tuple[int, int | None]:
        """Rows of a device's experts at most, and how many each has with ``strided``."""
        if self.strided:
            assert self.most is not None
            stride = self.group * self.most
            return self.local_experts * stride, stride
        rows = self.group * self.rows_from_one(tokens, topk)
        return (rows + self.local_experts * (self.tile - 1)) // self.tile * self.tile, None


class Dispatcher(Protocol):
    """A dispatcher; see the module's text."""

    def __call__(
        self,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        run: RunExperts,
        plan: DispatchPlan,
    ) -> jax.Array:
        """Outputs ``[N, h]`` of the experts, weighted and added up."""


def dispatch_local(
    x: jax.Array, experts: jax.Array, weights: jax.Array, run: RunExperts, plan: DispatchPlan
) -> jax.Array:
    """Every device has all experts."""
    slots, stride = plan.slots(*experts.shape)
    permutation, sizes = group_by_expert(experts, plan.num_experts, slots, stride, plan.tile)
    out = run(place_rows(x, permutation, plan.kernels), sizes)
    return combine_rows(out, weights, permutation, plan.kernels)


def own_experts(experts: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Choices as numbers of this device's experts; ``local_experts`` for all others."""
    first = lax.axis_index(plan.axes) * plan.local_experts
    local = experts - first
    return jnp.where((local >= 0) & (local < plan.local_experts), local, plan.local_experts)
