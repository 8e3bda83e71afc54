"""Attention over a context axis by fused kernels, on 1 to 4 GPUs, against the exact one on one.

Run with ``pytest -m gpu tests/gpu/test_context_on_gpus.py``.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxtron.kernels.attention import ATTENTION_BACKENDS
from jaxtron.kernels.attention_block_cudnn import CudnnBlockKernel
from jaxtron.kernels.attention_cudnn import CudnnAttention
from jaxtron.kernels.attention_spec import AttentionBackend
from jaxtron.kernels.attention_tiles import TiledBlockKernel
from jaxtron.parallel.context.attention import ContextAttention
from jaxtron.parallel.context.layout import ContextLayout

pytestmark = pytest.mark.gpu

BATCH, LENGTH, HEADS, GROUPS, HEAD_DIM = 2, 1024, 8, 4, 128
SCALE = HEAD_DIM**-0.5

# name: (ring, all_to_all, rows side by side, gather)
CUTS = {
    "all_gather 2": (2, 1, 1, True),
    "ring 2": (2, 1, 1, False),
    "all_to_all 2": (1, 2, 1, False),
    "two rows of 1": (1, 1, 2, False),
    "all_gather 4": (4, 1, 1, True),
    "ring 4": (4, 1, 1, False),
    "all_to_all 4": (1, 4, 1, False),
    "hierarchical 2 x 2": (2, 2, 1, False),
    "two rows, all_gather 2": (2, 1, 2, True),
    "two rows, ring 2": (2, 1, 2, False),
    "two rows, all_to_all 2": (1, 2, 2, False),
}
DOCUMENTS = np.stack(
    [
        np.searchsorted(cuts, np.arange(LENGTH), side="right").astype(np.int32)
        for cuts in ([200, 201, 700], [80, 400, 401, 640, 1000])
    ]
)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 150},
    "documents": {"segment_ids": DOCUMENTS},
}


def arrays() -> list[np.ndarray]:
    """Queries, keys, values and output gradient: bf16 numbers in fp32."""
    rng = np.random.default_rng(0)
    q, k = (BATCH, LENGTH, HEADS, HEAD_DIM), (BATCH, LENGTH, GROUPS, HEAD_DIM)
    return [
        np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float32)
        for shape in (q, k, k, q)
    ]


def output_and_gradients(
    layout: ContextLayout,
    gather: bool,
    backend: AttentionBackend,
    dtype: Any,
    mask: dict[str, Any],
    cut_documents: int | None = None,
) -> list[np.ndarray]:
    """Output, dq, dk and dv in natural order."""
    context = ContextAttention(layout, gather, cut_documents)
    segments = mask.get("segment_ids")
    rows = {"place": np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))}
    rows |= {} if segments is None else {"segment_ids": segments}
    if layout.groups == 1:  # else side by side are rows of one group each, below
        rows = dict(context.balanced(rows))
    order = rows["place"][:, layout.order(LENGTH)]
    mesh = Mesh(np.array(jax.devices("gpu")[: layout.groups * layout.size]), ("context",))

    def side_by_side(x: np.ndarray) -> np.ndarray:
        there = order.reshape(BATCH, LENGTH, *[1] * (x.ndim - 2))
        placed = np.take_along_axis(x, there, axis=1)
        return placed.reshape(-1, layout.groups * LENGTH, *x.shape[2:])

    *qkv, dout = (jnp.asarray(side_by_side(x), dtype) for x in arrays())
    if segments is not None:
        in_order = rows["segment_ids"][:, layout.order(LENGTH)]
        segments = jnp.asarray(in_order.reshape(-1, layout.groups * LENGTH))

    def local(q: Any, k: Any, v: Any, dout: Any, segments: Any) -> Any:
        attend = context.attend(
            LENGTH,
            scale=SCALE,
            window=mask.get("window"),
            segment_ids=segments,
            backend=backend,
        )

        def objective(q: Any, k: Any, v: Any) -> Any:
            out = attend(q, k, v, None)
            return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32)), out

        gradients, out = jax.grad(objective, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    spec = PartitionSpec(None, "context")
    specs = (*[spec] * 4, None if segments is None else spec)
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    results = jax.jit(function)(*qkv, dout, segments)
    found = (np.asarray(x, np.float32).reshape(BATCH, LENGTH, *x.shape[2:]) for x in results)
    back = np.argsort(order, axis=1)[:, :, None, None]
    return [np.take_along_axis(x, back, axis=1) for x in found]


@functools.cache
def exact(mask: str) -> list[np.ndarray]:
    """In fp32 on one GPU."""
    xla = ATTENTION_BACKENDS["xla"]
    return output_and_gradients(ContextLayout(1, 1), False, xla, jnp.float32, MASKS[mask])


def assert_equals_the_exact_kernel(got: list[np.ndarray], mask: str) -> None:
    for a, b in zip(got, exact(mask), strict=True):
        assert np.isfinite(a).all()
        # bf16 rounds inputs and outputs to 2**-9 relative; judged against the largest value
        assert np.abs(a - b).max() < 0.015 * np.abs(b).max()


@pytest.mark.parametrize("name", ["cudnn", "mosaic_gpu"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cut", CUTS)
def test_every_strategy_equals_the_exact_kernel(cut: str, mask: str, name: str) -> None:
    ring, all_to_all, groups, gather = CUTS[cut]
    layout = ContextLayout(ring, all_to_all, groups)
    if len(jax.devices("gpu")) < groups * layout.size:
        pytest.skip(f"needs {groups * layout.size} GPUs")
    backend = ATTENTION_BACKENDS[name]
    got = output_and_gradients(layout, gather, backend, jnp.bfloat16, MASKS[mask])
    assert_equals_the_exact_kernel(got, mask)


@pytest.mark.parametrize("name", ["cudnn", "mosaic_gpu"])
@pytest.mark.parametrize("cut", ["all_gather 2", "ring 2", "ring 4", "hierarchical 2 x 2"])
def test_documents_cut_by_themselves_equal_the_exact_kernel(cut: str, name: str) -> None:
    ring, all_to_all, groups, gather = CUTS[cut]
    layout = ContextLayout(ring, all_to_all, groups)
    if len(jax.devices("gpu")) < layout.size:
        pytest.skip(f"needs {layout.size} GPUs")
    backend = ATTENTION_BACKENDS[name]
    mask = MASKS["documents"]
    got = output_and_gradients(layout, gather, backend, jnp.bfloat16, mask, cut_documents=250)
    assert_equals_the_exact_kernel(got, "documents")


@pytest.mark.parametrize("tile", [64, 128])
def test_documents_in_tiles_on_one_gpu_equal_the_exact_kernel(tile: int) -> None:
    cudnn = CudnnAttention()
    cudnn.tile, cudnn.blocks = tile, TiledBlockKernel(CudnnBlockKernel(), tile)
    mask = MASKS["documents"]
    got = output_and_gradients(ContextLayout(1, 1), False, cudnn, jnp.bfloat16, mask)
    assert_equals_the_exact_kernel(got, "documents")
