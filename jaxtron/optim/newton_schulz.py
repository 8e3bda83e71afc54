"""Orthogonalisation by a Newton-Schulz iteration."""

from typing import Literal

import jax
import jax.numpy as jnp

CoefficientType = Literal["quintic", "simple"]
Precision = Literal["medium", "high", "highest"]

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "simple": ((3.4445, -4.7750, 2.0315),),
}
"""Coefficients (a, b, c) of the steps, used in turn; the names are Megatron's.

``simple``: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; ``quintic``: You 2025,
a set per step found by optimisation.
"""

EPSILON = 1e-7
"""Smallest Frobenius norm that a matrix is divided by."""


def orthogonalize(
    matrices: jax.Array, *, steps: int, coefficient_type: CoefficientType, precision: Precision
) -> jax.Array:
    """Replace the singular values of ``matrices [n, rows, columns]`` by values near 1.

    Each step is ``X <- a X + (b A + c A A) X`` with ``A = X X^T``, which maps every singular value
    s to ``a s + b s^3 + c s^5`` and keeps the singular vectors. It starts from the matrix divided
    by its Frobenius norm.

    Args:
        matrices: any real dtype.
        steps: a multiple of the number of coefficient sets.
        coefficient_type: key of :data:`COEFFICIENTS`.
        precision: of the products, as torch names it: ``medium`` bfloat16, ``high`` TF32 (where the
            device has it), ``highest`` float32.

    Returns:
        float32 ``[n, rows, columns]``.
    """
    x = matrices.astype(jnp.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # A has the size of the shorter side
        x = x.mT
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    x = x / jnp.maximum(norm, EPSILON)

    def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
        if precision == "medium":
            left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
            return jnp.matmul(left, right, preferred_element_type=jnp.float32)
        return jnp.matmul(left, right, precision=precision)

    sets = COEFFICIENTS[coefficient_type]
    for step in range(steps):
        a, b, c = sets[step % len(sets)]
        gram = multiply(x, x.mT)
        x = a * x + multiply(b * gram + c * multiply(gram, gram), x)
    return x.mT if tall else x
