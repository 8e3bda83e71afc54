"""Microbatches in turns: the results of each alone, and who waits for whom."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Var
from jax.sharding import Mesh, PartitionSpec

from jaxtron.bench.scopes import scope_of
from jaxtron.parallel.exchange import gather_tensor, scatter_tensor
from jaxtron.parallel.side_by_side import side_by_side

BLOCKS = 3


@functools.partial(jax.jit, inline=True, static_argnums=0)  # as the layers of an unrolled loop
def block(exchange: bool, x: jax.Array, pair: jax.Array) -> jax.Array:
    gathered = gather_tensor(x) if exchange else lax.all_gather(x, "tensor")
    y = jnp.tanh(gathered @ pair[0]) @ pair[1]
    return x + (scatter_tensor(y) if exchange else lax.psum_scatter(y, "tensor"))


def blocks(exchange: bool, weights: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
    """Three tensor-parallel blocks of two products on a stream ``[tokens, h]``."""
    for pair in weights:
        x = block(exchange, x, pair)
    return {"stream": x, "squares": lax.psum(jnp.sum(x * x), "tensor")}


def gradients(exchange: bool, weights: jax.Array, x: jax.Array) -> Any:
    """Of the sum of squares, with the stream."""

    def objective(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = blocks(exchange, *arguments)
        return out["squares"], out["stream"]

    return jax.grad(objective, argnums=(0, 1), has_aux=True)(weights, x)


def on_two_devices(function: Any) -> Any:
    """``function`` of weights ``[block, 2, h, h]`` and streams ``[stream, tokens, h]``."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    streams = PartitionSpec(None, "tensor")
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(PartitionSpec(), streams),
        out_specs=PartitionSpec("tensor"),
        check_vma=False,
    )


def example(streams: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    weights = jax.random.normal(keys[0], (BLOCKS, 2, 8, 8))
    return weights, jax.random.normal(keys[1], (streams, 4, 8))


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("function", [blocks, gradients])
def test_the_results_are_those_of_each_alone(function: Any, streams: int, exchange: bool) -> None:
    def stacked(results: list[Any]) -> Any:
        return jax.tree.map(lambda *each: jnp.stack(each)[None], *results)

    def turns(weights: jax.Array, xs: jax.Array) -> Any:
        return stacked(side_by_side(lambda x: function(exchange, weights, x), list(xs)))

    def alone(weights: jax.Array, xs: jax.Array) -> Any:
        return stacked([function(False, weights, x) for x in xs])

    given = example(streams)
    together = jax.jit(on_two_devices(turns))(*given)
    expected = jax.jit(on_two_devices(alone))(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), together, expected)


@pytest.mark.parametrize("exchange", [False, True])
def test_blocks_alternate_and_collectives_stand_beside_the_other_microbatch(exchange: bool) -> None:
    found: dict[str, list[list[Var]]] = {}
    waits: dict[Var, set[Var]] = {}

    def turns(weights: jax.Array, xs: jax.Array) -> Any:
        def forward(x: jax.Array) -> Any:  # as it is where derivatives are asked for
            return jax.vjp(lambda y: blocks(exchange, weights, y), x)[0]

        traced = jax.make_jaxpr(lambda a, b: side_by_side(forward, [a, b]))(xs[0], xs[1])
        stream: dict[Var, int] = dict(zip(traced.jaxpr.invars, (0, 1), strict=True))
        for equation in traced.jaxpr.eqns:
            name = equation.primitive.name
            read = [v for v in equation.invars if isinstance(v, Var)]
            behind = set(read).union(*(waits.get(v, ()) for v in read))
            for i, out in enumerate(equation.outvars):
                waits[out] = behind
                own = [read[i]] if name == "optimization_barrier" else read
                of = [stream[v] for v in own if v in stream]
                stream |= {out: of[0]} if of else {}
            if name == "all_to_all":
                name = "all_gather" if equation.params["tiled"] else "reduce_scatter"
            if name in ("dot_general", "all_gather", "reduce_scatter"):
                out = equation.outvars[0]
                found.setdefault(name, [[], []])[stream[out]].append(out)
        return xs[:1]

    jax.eval_shape(on_two_devices(turns), *example(2))
    gather, scatter = found["all_gather"], found["reduce_scatter"]
    first, last = ([each[i::2] for each in found["dot_general"]] for i in (0, 1))
    assert [len(each) for each in (*gather, *scatter, *first, *last)] == [BLOCKS] * 8
    for k in range(BLOCKS):
        # one after the other, without waiting for what lies between the other's blocks
        assert last[0][k] in waits[first[1][k]]
        assert scatter[0][k] not in waits[first[1][k]]
        assert scatter[0][k] in waits[last[1][k]]
        if k + 1 < BLOCKS:
            assert last[1][k] in waits[first[0][k + 1]]
            assert scatter[1][k] not in waits[first[0][k + 1]]
            assert scatter[1][k] in waits[last[0][k + 1]]
            assert gather[0][k + 1] not in waits[last[1][k]]
            assert gather[0][k + 1] in waits[scatter[1][k]]


def test_operations_keep_the_scope_and_pass_by_which_a_profile_tells_them() -> None:
    @functools.partial(jax.jit, inline=True)
    def layer(x: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            return jnp.sum(jnp.tanh(x))

    def both(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        return side_by_side(jax.grad(layer), [x, y])

    x = jnp.ones(3)
    text = jax.jit(both).lower(x, x).as_text(debug_info=True)
    found = {scope_of(name) for name in re.findall(r'"(jit\(both\)[^"]*)"', text)}
    assert {("mlp", "forward"), ("mlp", "backward")} <= found
