"""What the executor keeps between ticks: residuals of activations, and never a weight."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.parallel.pipeline.residuals import Ring, Stretch, read, write
from jaxtron.parallel.pipeline.step import _where_measured
from jaxtron.parallel.pipeline.table import programs, tick_table
from jaxtron.precision.fp8_weight import Fp8Gradient
from jaxtron.program import Program
from tests.parity.harness import initial_state, make_batch, make_config, rows_of
from tests.program.jaxprs import equations

MODEL = {"num_layers": 4, "num_query_groups": 2, "max_position_embeddings": 64}


def program_of(
    microbatches: int,
    loop: str = "unroll",
    seq_length: int = 16,
    recompute: Any = "none",
    **parallel: Any,
) -> Program:
    config = make_config(
        model=MODEL,
        data={"seq_length": seq_length},
        parallel={"pipeline": 2, **parallel},
        train={
            "num_microbatches": microbatches,
            "global_batch_size": microbatches,
            "layer_loop": loop,
            "recompute": recompute,
        },
    )
    return Program(config, jax.devices()[:2])


def arguments(program: Program) -> tuple[Any, Any]:
    batch = rows_of(program, make_batch(program.config, ragged=False))
    shapes = jax.tree.map(
        lambda layout, sharding: jax.ShapeDtypeStruct(layout.shape, np.float32, sharding=sharding),
        program.layouts,
        program.state_shardings["params"],
        is_leaf=lambda node: hasattr(node, "stored_spec"),
    )
    return shapes, batch


def ring_of(program: Program) -> list[Any]:
    """Abstract values of the residual buffer, from the carry of the last phase that forwards."""
    jaxpr = jax.make_jaxpr(program.loss_and_gradients)(*arguments(program)).jaxpr
    scans = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
    *_, scan, _ = [
        e for e in scans if any(i.primitive.name == "ppermute" for i in equations(inner(e)))
    ]
    executor = program.executor
    schedule = executor.make_schedule(program.batch_layout.num_microbatches)
    table = tick_table(schedule, programs(executor.placement))
    slots = 1 + table["f_slot"].max()
    results = [v.aval for v in scan.outvars]
    return [a for a in results if a.ndim > 1 and a.shape[0] == slots]


def inner(scan: Any) -> Any:
    return getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"])


@pytest.mark.parametrize("loop", ["unroll", "scan"])
def test_no_form_of_a_weight_is_kept_in_the_ring(loop: str) -> None:
    """Every large array in it has the tokens of a row, 3 x 13, among its dimensions' factors."""
    # 3 slots; nothing else that is carried has 3 of anything in front
    program = program_of(6, loop, seq_length=39)
    ring = ring_of(program)
    layers = jax.tree.leaves(program.model.shapes["layers"])
    smallest = min(leaf.size // leaf.shape[0] for leaf in layers if leaf.ndim > 2)
    large = [a.shape for a in ring if math.prod(a.shape[1:]) >= smallest]
    assert large
    for shape in large:
        assert math.prod(shape) % 13 == 0, shape


def test_messages_are_bf16_and_are_sent_outside_of_branches() -> None:
    """Activations and gradients; the weights' gradients are sums over fsdp, not over stages."""
    config = make_config(
        model=MODEL,
        parallel={"pipeline": 2, "virtual_pipeline": 2, "pipeline_schedule": "interleaved"},
        train={"num_microbatches": 4, "global_batch_size": 4},
        precision={"compute": "bf16"},
    )
    program = Program(config, jax.devices()[:2])
    jaxpr = jax.make_jaxpr(program.loss_and_gradients)(*arguments(program)).jaxpr
    all_of_them = list(equations(jaxpr))
    sends = [e for e in all_of_them if e.primitive.name == "ppermute"]
    # both ways in the steady ticks, one way in warm-up and cool-down
    assert len(sends) == 4
    assert {str(v.aval.dtype) for e in sends for v in e.invars} == {"bfloat16"}
    branches = [
        branch.jaxpr
        for e in all_of_them
        if e.primitive.name == "cond"
        for branch in e.params["branches"]
    ]
    assert branches
    inside = {e.primitive.name for branch in branches for e in equations(branch)}
    assert "dot_general" in inside and "ppermute" not in inside


def temporary_bytes(program: Program) -> int:
    compiled = jax.jit(program.loss_and_gradients).lower(*arguments(program)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_number_of_microbatches() -> None:
    few, many = temporary_bytes(program_of(8)), temporary_bytes(program_of(32))
    # what grows are the tokens' weights and row numbers, 24 microbatches of 16 tokens
    assert many - few <= 24 * 16 * 4 * 4


def test_a_slot_of_the_ring_costs_the_bytes_of_its_residuals() -> None:
    """gpipe keeps all microbatches: 4 more cost 4 slots in the compiled program."""
    make = functools.partial(program_of, recompute={}, pipeline_schedule="gpipe")
    ring = ring_of(make(12))
    slot = sum(math.prod(a.shape[1:]) * a.dtype.itemsize for a in ring)
    grown = temporary_bytes(make(16)) - temporary_bytes(make(12))
    # XLA leaves out arrays that are equal; the zeros of equal shapes are made once, and copied
    assert 0.9 * 4 * slot <= grown <= 1.1 * 4 * slot


def test_residuals_come_back_from_their_slot() -> None:
    """f(w, x) = sin(w x): its derivative needs w, which both passes are given, and cos(w x)."""
    w, xs = jax.numpy.float32(0.7), jax.numpy.arange(4.0)
    stretch, ring = Stretch(), Ring(2)

    def function(w: Any, x: Any) -> Any:
        return jax.numpy.sin(w * x), ()

    def run(w: Any, xs: Any) -> Any:
        _, _, kept = jax.eval_shape(lambda: stretch.forward(function, (w, xs[0]), [w]))
        stretch.entries = ring.assign(kept)
        buffer, found = ring.zeros(), []
        for i in (0, 1):
            _, _, kept = stretch.forward(function, (w, xs[i]), [w])
            buffer = write(buffer, stretch.entries, kept, i)
        for i in (1, 0):
            found.append(stretch.backward(1.0, [w], read(buffer, stretch, i)))
        return found

    gradients = jax.jit(run)(w, xs)
    for (g_w, g_x), x in zip(gradients, (1.0, 0.0), strict=True):
        np.testing.assert_allclose(g_w, x * np.cos(0.7 * x), rtol=1e-6)
        np.testing.assert_allclose(g_x, 0.7 * np.cos(0.7 * x), rtol=1e-6)
    assert all(shape == () for shape, _ in ring.leaves)


def test_a_growing_batch_has_a_schedule_for_each_size() -> None:
    """The losses of one device, at 2, 4 and 6 microbatches."""

    def losses(stages: int) -> list[float]:
        train = {
            "num_microbatches": None,
            "micro_batch_size": 1,
            "global_batch_size": 6,
            "rampup_batch_size": [2, 2, 6],
        }
        config = make_config(
            model=MODEL, parallel={"pipeline": stages}, data={"seq_length": 16}, train=train
        )
        program = Program(config, jax.devices()[:stages])
        state, batch, found = initial_state(program), make_batch(config, ragged=False), []
        for rows in (2, 4, 6):
            placed = program.place({name: array[:rows] for name, array in batch.items()})
            state, metrics = program.train_step(state, placed)
            found.append(float(metrics["loss"]))
        return found

    np.testing.assert_allclose(losses(2), losses(1), rtol=2e-6)


def test_a_tick_without_a_unit_measures_nothing_for_fp8() -> None:
    """Its residuals are of no unit; its gradients of weights are zeros already."""
    grads = [
        {"mlp/up": Fp8Gradient(jnp.array([2.0]), jnp.array([3.0, 4.0])), "norm": jnp.array([5.0])},
        {"mlp/up": Fp8Gradient(jnp.array([6.0]), None), "norm": jnp.array([7.0])},
    ]
    working = _where_measured(jnp.array(True), grads)
    idle = _where_measured(jnp.array(False), grads)
    jax.tree.map(np.testing.assert_array_equal, working, grads)
    assert idle[0]["mlp/up"].amax.tolist() == [0, 0] and idle[1]["mlp/up"].amax is None
    idle[0]["mlp/up"] = grads[0]["mlp/up"]
    jax.tree.map(np.testing.assert_array_equal, idle, grads)
