"""Kernels whose groups begin at whole tiles of rows, and what may lie behind the last group."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtron.kernels.grouped_matmul import GROUPED_MATMULS
from jaxtron.kernels.grouped_matmul_hopper import (
    ROW_TILE,
    rows_times_rows,
    rows_times_weights,
    tile_groups,
)
from jaxtron.kernels.grouped_matmul_spec import GroupedMatmulSpec
from jaxtron.layers.activation import gated, gated_gradients
from jaxtron.layers.moe.permute import group_by_expert, place_rows
from tests.moe.block import assert_same, model_config, run_block

TILE = 8


def test_every_expert_begins_at_a_tile() -> None:
    experts = jnp.array([[2], [0], [2], [3], [0], [2], [4]], jnp.int32)  # 4: nowhere
    permutation, sizes = group_by_expert(experts, 4, 16, tile=4)
    np.testing.assert_array_equal(sizes, [2, 0, 3, 1])
    np.testing.assert_array_equal(
        permutation.source, [1, 4, 7, 7, 0, 2, 5, 7, 3, 7, 7, 7, 7, 7, 7, 7]
    )
    np.testing.assert_array_equal(permutation.slots[:, 0], [4, 0, 5, 8, 1, 6, 16])
    x = jnp.arange(1.0, 8.0)[:, None]
    rows = place_rows(x, permutation)[:, 0]
    np.testing.assert_array_equal(rows[:12], [2, 5, 0, 0, 1, 3, 6, 0, 4, 0, 0, 0])


def test_tiles_know_their_group_and_how_many_are_used() -> None:
    sizes = jnp.array([1, 0, ROW_TILE + 1, ROW_TILE], jnp.int32)
    groups, used = tile_groups(sizes, 6)
    np.testing.assert_array_equal(groups[:4], [0, 2, 2, 3])
    np.testing.assert_array_equal(used, [4])


class Tiled:
    """As a kernel may behave that leaves tiles behind the last group as it found them."""

    name = "xla"
    strided = False
    row_tile = TILE
    row_kernels: Any = None

    def supports(self, spec: GroupedMatmulSpec, platform: str) -> str | None:
        return None

    def __call__(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        @jax.custom_vjp
        def product(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return forward(rows, weights)[0]

        reserved = (sizes + TILE - 1) // TILE * TILE
        behind = (jnp.arange(rows.shape[0]) >= jnp.sum(reserved))[:, None]

        def forward(rows: jax.Array, weights: jax.Array) -> Any:
            out, vjp = jax.vjp(
                lambda r, w: lax.ragged_dot(r, w, reserved), jnp.where(behind, 0, rows), weights
            )
            return jnp.where(behind, jnp.nan, out), vjp

        def backward(vjp: Any, g: jax.Array) -> Any:
            d_rows, d_weights = vjp(jnp.where(behind, 0, g))
            return jnp.where(behind, jnp.nan, d_rows), d_weights

        product.defvjp(forward, backward)
        return product(rows, weights)


class TiledRows:
    """As kernels may behave that work on tiles in use only: NaN behind them, and from there."""

    activations = frozenset({"swiglu"})

    @staticmethod
    def _behind(rows: int, sizes: jax.Array) -> jax.Array:
        return jnp.arange(rows) >= jnp.sum((sizes + TILE - 1) // TILE * TILE)

    def gated(self, u: jax.Array, sizes: jax.Array, activation: str) -> jax.Array:
        behind = self._behind(u.shape[0], sizes)

        @jax.custom_vjp
        def act(u: jax.Array) -> jax.Array:
            return jnp.where(behind[:, None], jnp.nan, gated(u, activation))

        def backward(u: jax.Array, g: jax.Array) -> Any:
            d_u = jnp.stack(gated_gradients(u, g, activation), axis=1)
            return (jnp.where(behind[:, None, None], jnp.nan, d_u),)

        act.defvjp(lambda u: (act(u), u), backward)
        return act(u)

    def place(
        self,
        x: jax.Array,
        source: jax.Array,
        sizes: jax.Array,
        topk: int,
        weights: jax.Array | None = None,
    ) -> jax.Array:
        rows = x.at[source // topk].get(mode="fill", fill_value=0)
        if weights is not None:
            rows *= weights.reshape(-1).at[source].get(mode="fill", fill_value=0)[:, None]
        return jnp.where(self._behind(source.shape[0], sizes)[:, None], jnp.nan, rows)


@pytest.mark.parametrize("row_kernels", [None, TiledRows()], ids=["all rows", "row kernels"])
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({}, {}),
        ({}, {"moe_expert_capacity_factor": 0.75}),
        ({"expert": 4}, {}),
        ({"expert": 2, "tensor": 2}, {"moe_token_dispatcher_type": "allgather"}),
    ],
    ids=str,
)
def test_nothing_reads_behind_the_last_group(
    mesh: dict[str, int],
    changes: dict[str, Any],
    row_kernels: TiledRows | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = model_config(**changes, moe_grouped_gemm_backend="xla")
    expected = run_block(config)
    monkeypatch.setattr(Tiled, "row_kernels", row_kernels)
    monkeypatch.setitem(GROUPED_MATMULS, "xla", Tiled())
    assert_same(run_block(config, mesh), expected)


def test_all_layers_of_a_program_share_a_kernel() -> None:
    def layers(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
        for _ in range(2):
            rows = rows_times_weights(rows, weights, sizes, transposed=False, blocks=132)
        return [rows_times_rows(rows, rows, sizes, blocks=132) for _ in range(2)]

    shapes = [((256, 128), jnp.bfloat16), ((2, 128, 128), jnp.bfloat16), ((2,), jnp.int32)]
    traced = jax.make_jaxpr(layers)(*[jax.ShapeDtypeStruct(*shape) for shape in shapes])
    first, second, third, fourth = [id(call.params["jaxpr"]) for call in traced.eqns]
    assert first == second != third == fourth, "what is lowered twice takes twice the time"
