"""Products and gradients of the Hopper kernels against a product for each expert, on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.kernels.grouped_matmul import choose_grouped_matmul
from jaxtron.kernels.grouped_matmul_spec import GroupedMatmulSpec

pytestmark = pytest.mark.gpu

GROUPS, INNER, OUTER, SLOTS = 4, 384, 512, 2048


@pytest.mark.parametrize(
    "sizes", [(256, 256, 256, 256), (1, 0, 700, 130), (0, 0, 0, 0), (0, 2048, 0, 0)], ids=str
)
def test_products_and_gradients_are_those_of_every_expert(sizes: tuple[int, ...]) -> None:
    spec = GroupedMatmulSpec(SLOTS, GROUPS, INNER, OUTER, jnp.dtype(jnp.bfloat16), 256, None)
    kernel = choose_grouped_matmul("mosaic_gpu", spec, "gpu")
    keys = jax.random.split(jax.random.key(0), 3)
    starts = np.cumsum([0, *(-(-n // kernel.row_tile) * kernel.row_tile for n in sizes)])
    used = np.zeros((SLOTS, 1), np.float32)
    for start, size in zip(starts, sizes, strict=False):
        used[start : start + size] = 1
    x = (jax.random.normal(keys[0], (SLOTS, INNER)) * used).astype(jnp.bfloat16)
    g = (jax.random.normal(keys[1], (SLOTS, OUTER)) * used).astype(jnp.bfloat16)
    w = jax.random.normal(keys[2], (GROUPS, INNER, OUTER)).astype(jnp.bfloat16)
    out, vjp = jax.vjp(lambda x, w: kernel(x, w, jnp.array(sizes, jnp.int32)), x, w)
    d_x, d_w = vjp(g)
    x, g, w = (np.asarray(a, np.float64) for a in (x, g, w))
    for e in range(GROUPS):
        rows = slice(starts[e], starts[e + 1])
        for actual, expected in (
            (out[rows], x[rows] @ w[e]),
            (d_x[rows], g[rows] @ w[e].T),
            (d_w[e], x[rows].T @ g[rows]),
        ):
            scale = np.max(np.abs(expected), initial=1e-9)
            error = np.abs(np.asarray(actual, np.float64) - expected)
            assert np.max(error, initial=0) <= 2**-7 * scale
