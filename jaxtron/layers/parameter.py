"""Parameters with named dimensions.

Every parameter is an ``nnx.Param`` whose metadata key ``logical`` names its dimensions; the table
in ``jaxtron/mesh/rules.py`` maps the names to mesh axes. A weight of a matrix product that
``precision.fp8`` applies to says so in ``product``. (Flax's own ``sharding`` key is not used:
it makes Flax place arrays eagerly on a mesh.)

Initial values follow Megatron: N(0, std) for weights, 0 for biases, 1 for norm weights.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

LogicalAxes = tuple[str | None, ...]


@dataclass(frozen=True)
class Product:
    """The matrix product that a weight takes part in.

    That of ``jaxtron/layers/linear.py``, or one for each expert (``jaxtron/layers/moe``).

    Attributes:
        name: of the product within its module; weights multiplied together share it.
        inputs: dimensions of the weight that are summed over.
        experts: whether the first dimension, before these, numbers experts.
    """

    name: str
    inputs: int = 1
    experts: bool = False


def normal(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    logical: LogicalAxes,
    std: float,
    drawn_rows: int | None = None,
    product: Product | None = None,
) -> nnx.Param:
    """Weight drawn from N(0, std) in fp32.

    Args:
        rngs: source of the key.
        shape: global shape.
        logical: name per dimension.
        std: standard deviation.
        drawn_rows: rows of the first dimension that are drawn; the rest (padding) is zero, so that
            the drawn values do not depend on the padding.
        product: of :func:`jaxtron.layers.linear.linear` or of experts, which it is for; None:
            another use.
    """
    rows = shape[0] if drawn_rows is None else drawn_rows
    value = std * jax.random.normal(rngs.params(), (rows, *shape[1:]), jnp.float32)
    if rows != shape[0]:
        value = jnp.pad(value, [(0, shape[0] - rows)] + [(0, 0)] * (len(shape) - 1))
    return nnx.Param(value, logical=logical, product=product)


def zeros(shape: tuple[int, ...], logical: LogicalAxes) -> nnx.Param:
    """Parameter that starts at zero."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), logical=logical)


def ones(shape: tuple[int, ...], logical: LogicalAxes) -> nnx.Param:
    """Parameter that starts at one."""
    return nnx.Param(jnp.ones(shape, jnp.float32), logical=logical)
