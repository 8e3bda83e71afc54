"""Packed rows on one member of the context axis, with a kernel that works in tiles."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxtron.kernels.attention_tiles import TiledBlockKernel
from jaxtron.kernels.attention_xla import XlaAttention
from jaxtron.parallel.context.attention import ContextAttention
from jaxtron.parallel.context.layout import ContextLayout
from tests.kernels.reference import attention, visible_keys

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
