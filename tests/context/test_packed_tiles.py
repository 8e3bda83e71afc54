"""Packed rows on one member of the context axis, with a kernel that works in tiles."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxtron.kernels.attention_tiles import TiledBlockKernel
from jaxtron.kernels.attention_xla import XlaAttention
from jaxtron.parallel.context import balance
from jaxtron.parallel.context.attention import ContextAttention
from jaxtron.parallel.context.layout import ContextLayout
from tests.kernels.reference import attention, attention_gradients, visible_keys

SEGMENTS = np.array([[0] * 3 + [1] * 5, [0] * 8], np.int32)


class Tiles(TiledBlockKernel):
    """Counts how often it is asked."""

    calls = 0

    def forward(self, *args, **kwargs):
        Tiles.calls += 1
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(("tile", "calls"), [(2, 1), (4, 0), (3, 0), (None, 0)])
def test_rows_of_four_whole_tiles_are_computed_in_tiles(tile: int | None, calls: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 8, heads, 4)).astype(np.float32) for heads in (2, 1, 1))
    backend = XlaAttention()
    backend.tile = tile
    backend.blocks = Tiles(backend.blocks, tile or 1)
    Tiles.calls = 0

    def local(q, k, v, segments):
        context = ContextAttention(ContextLayout(1, 1), False)
        attend = context.attend(8, scale=0.5, window=None, segment_ids=segments, backend=backend)
        return attend(q, k, v, None)

    mesh, spec = Mesh(np.array(jax.devices()[:1]), ("context",)), PartitionSpec()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    out = jax.jit(mapped)(q, k, v, SEGMENTS)
    seen = np.stack([visible_keys(8, 8, True, None, row) for row in SEGMENTS])
    np.testing.assert_allclose(out, attention(q, k, v, 0.5, seen), rtol=1e-5, atol=1e-6)
    assert Tiles.calls == calls


@pytest.mark.parametrize("cut", [None, 9])
def test_a_ring_of_packed_rows_in_tiles_equals_the_softmax_over_all_keys(
    monkeypatch: pytest.MonkeyPatch, cut: int | None
) -> None:
    """Chunks of two tiles; documents cut with the row, or by themselves from some length."""
    monkeypatch.setattr(balance, "TILE", 4)  # so that documents are cut in whole tiles
    length = 32
    context = ContextAttention(ContextLayout(2, 1), False, cut)
    segments = np.stack(
        [np.repeat(np.arange(4), [13, 4, 9, 6]), np.repeat(np.arange(3), [1, 30, 1])]
    ).astype(np.int32)
    place = np.broadcast_to(np.arange(length), segments.shape)
    rows = context.balanced({"segment_ids": segments, "place": place})
    placed, order = context.place(rows["segment_ids"]), context.place(rows["place"])
    assert bool((np.sort(order, axis=1) == place).all())
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.normal(size=(2, length, heads, 4)).astype(np.float32) for heads in (2, 1, 1, 2)
    )
    backend = XlaAttention()
    backend.tile = 4
    backend.blocks = TiledBlockKernel(backend.blocks, 4)

    def local(q, k, v, dout, segments):
        attend = context.attend(
            length, scale=0.5, window=None, segment_ids=segments, backend=backend
        )
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, None), q, k, v)
        return out, *pull(dout)

    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("context",)), PartitionSpec(None, "context")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    there = order[:, :, None, None]
    got = jax.jit(mapped)(*(np.take_along_axis(x, there, 1) for x in (q, k, v, dout)), placed)
    seen = np.stack([visible_keys(length, length, True, None, row) for row in segments])
    want = attention(q, k, v, 0.5, seen), *attention_gradients(q, k, v, 0.5, seen, dout)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, np.take_along_axis(b, there, 1), rtol=1e-4, atol=1e-5)
