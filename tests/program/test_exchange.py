"""Tensor-parallel parts exchanged: values, derivatives, what travels, and when it is chosen."""

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxtron.config.load import load_config
from jaxtron.log_once import log_once
from jaxtron.mesh.axes import AXES
from jaxtron.mesh.mesh import process_axis
from jaxtron.parallel.exchange import (
    exchanges_in_process,
    exchanges_stream,
    gather_tensor,
    scatter_tensor,
)
from tests.parity.harness import assert_parity, make_config, reference, run
from tests.program.collectives import collectives, count
from tests.program.test_data_sharding import lower


def over_tensor(function: Any, members: int) -> Any:
    """``function`` of what each member of ``tensor`` holds, along the first dimension."""
    mesh = Mesh(np.array(jax.devices()[:members]), ("tensor",))
    spec = PartitionSpec("tensor")
    mapped = jax.shard_map(
        lambda *args: function(*(a[0] for a in args))[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("members", [2, 4, 8])
def test_gathered_parts_and_their_gradients(members: int) -> None:
    rng = np.random.default_rng(members)
    x, g = rng.normal(size=(members, 3, 5)), rng.normal(size=(members, members, 3, 5))
    x, g = x.astype(np.float32), g.astype(np.float32)
    for member in np.asarray(over_tensor(gather_tensor, members)(x)):
        np.testing.assert_array_equal(member, x)
    pulled = over_tensor(lambda a, b: jax.vjp(gather_tensor, a)[1](b)[0], members)(x, g)
    np.testing.assert_allclose(pulled, g.sum(0), rtol=1e-6)


@pytest.mark.parametrize("members", [2, 4, 8])
def test_summed_parts_and_their_gradients(members: int) -> None:
    rng = np.random.default_rng(members)
    x, g = rng.normal(size=(members, members, 3, 5)), rng.normal(size=(members, 3, 5))
    x, g = x.astype(np.float32), g.astype(np.float32)
    np.testing.assert_allclose(over_tensor(scatter_tensor, members)(x), x.sum(0), rtol=1e-5)
    pulled = over_tensor(lambda a, b: jax.vjp(scatter_tensor, a)[1](b)[0], members)(x, g)
    for member in np.asarray(pulled):
        np.testing.assert_array_equal(member, g)


def test_16_bit_parts_are_added_in_fp32() -> None:
    # 1 + 3 * 2^-9: in bf16 each term alone is lost
    parts = jnp.tile(jnp.asarray([1, 2**-9, 2**-9, 2**-9, 0, 0, 0, 0], "bfloat16")[:, None], (1, 8))
    summed = over_tensor(scatter_tensor, 8)(parts)
    assert summed.dtype == jnp.bfloat16
    exact = np.float32(1 + 3 * 2**-9)
    np.testing.assert_array_equal(np.asarray(summed, np.float32), jnp.bfloat16(exact))
    assert jnp.bfloat16(exact) > 1


@pytest.mark.parametrize(
    "parallel, train",
    [
        ({"tensor": 8}, {}),
        ({"fsdp": 2, "tensor": 4}, {"num_microbatches": 2}),
        ({"data": 2, "tensor": 2}, {"layer_loop": "scan"}),
        ({"fsdp": 2, "context": 2, "tensor": 2}, {}),
        ({"pipeline": 2, "tensor": 2}, {"num_microbatches": 4}),
        ({"tensor": 4}, {"recompute": "full"}),
        ({"tensor": 4, "fsdp": 2, "data_sharding": "optim_grads_params"}, {}),
        ({"tensor": 2}, {"num_microbatches": 8, "microbatches_at_once": 3, "layer_loop": "unroll"}),
    ],
)
def test_a_step_equals_that_of_one_device(parallel: dict[str, Any], train: dict[str, Any]) -> None:
    count = {k: v for k, v in train.items() if k == "num_microbatches"}
    devices = int(np.prod([parallel.get(axis, 1) for axis in AXES]))
    assert_parity(
        run({**parallel, "tp_comm_overlap": True}, jax.devices()[:devices], train=train),
        reference(train=count),
    )


def test_products_in_fp8_are_those_of_gathered_parts() -> None:
    precision = {"compute": "bf16", "fp8": "current"}
    results = [
        run({"tensor": 2, "tp_comm_overlap": exchange}, jax.devices()[:2], precision=precision)
        for exchange in (True, False)
    ]
    # sums of two bf16 parts are rounded once either way
    for a, b in zip(*(jax.tree.leaves(result["grads"]) for result in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9)


def test_a_step_exchanges_all_that_it_gathered_and_scattered() -> None:
    def found(asked: bool) -> Any:
        parallel = {"tensor": 8, "tp_comm_overlap": asked}
        return collectives(lower(make_config(model={"num_layers": 2}, parallel=parallel)))

    plain, exchanged = found(False), found(True)
    assert count(plain, "all_to_all") == {}
    assert count(exchanged, "all_gather") == count(exchanged, "reduce_scatter") == {}
    gathered, scattered = count(plain, "all_gather"), count(plain, "reduce_scatter")
    assert count(exchanged, "all_to_all") == {
        depth: gathered.get(depth, 0) + scattered.get(depth, 0) for depth in gathered | scattered
    }


def mesh_of(per_process: int, **sizes: int) -> Any:
    """A mesh whose devices know their process, as far as the functions tested look at it."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = np.empty(int(np.prod(shape)), object)
    for n in range(devices.size):
        devices[n] = SimpleNamespace(process_index=n // per_process)
    return SimpleNamespace(
        axis_names=AXES, devices=devices.reshape(shape), shape=dict(zip(AXES, shape, strict=True))
    )


@pytest.mark.parametrize(
    "per_process, sizes, expected",
    [
        (8, {"tensor": 8}, "tensor"),
        (4, {"tensor": 4, "fsdp": 2}, "tensor"),
        (4, {"tensor": 4, "pipeline": 2}, "tensor"),
        (8, {"tensor": 4, "fsdp": 2}, None),  # two groups in a process
        (2, {"tensor": 4, "fsdp": 2}, None),  # two processes in a group
        (1, {"tensor": 8}, None),
        (8, {"fsdp": 8}, "fsdp"),
        (4, {"data": 2, "fsdp": 4}, "fsdp"),
        (4, {"fsdp": 8}, None),
        (2, {"fsdp": 2, "expert": 2, "data": 2}, "expert"),
        (1, {}, None),
    ],
)
def test_the_axis_along_which_a_process_has_its_devices(
    per_process: int, sizes: dict[str, int], expected: str | None
) -> None:
    assert process_axis(mesh_of(per_process, **sizes)) == expected


@pytest.mark.parametrize(
    "sizes, kinds, expected",
    [
        ({"tensor": 4}, {"stream"}, True),
        ({"tensor": 4}, {"gradients"}, False),
        ({"fsdp": 4}, {"gradients"}, True),
        ({"fsdp": 4}, {"stream"}, False),
        ({"expert": 4}, {"gradients"}, True),
        ({"expert": 4}, {"gradients", "ragged"}, False),
        ({"context": 4}, {"gradients"}, False),
        ({"pipeline": 2, "fsdp": 4}, {"gradients"}, False),
        ({"fsdp": 2, "tensor": 2}, {"gradients", "stream"}, False),
    ],
)
def test_what_may_be_copied(sizes: dict[str, int], kinds: set[str], expected: bool) -> None:
    given = {kind: kind in kinds for kind in ("stream", "gradients", "ragged")}
    assert exchanges_in_process(mesh_of(4, **sizes), **given) is expected


def test_null_is_decided_and_said(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    one, two = mesh_of(4, tensor=4), mesh_of(4, tensor=2, fsdp=2)
    chosen = {}
    with caplog.at_level(logging.INFO):
        for asked, mesh, copies, split in itertools.product(
            (None, True, False), (one, two), (True, False), (True, False)
        ):
            text = "null" if asked is None else str(asked).lower()
            parallel = load_config(
                {"preset": "tiny"}, ["parallel.tensor=2", f"parallel.tp_comm_overlap={text}"]
            ).parallel
            key = (asked, mesh is one, copies, split)
            chosen[key] = exchanges_stream(parallel, mesh, sequence_parallel=split, copies=copies)
    assert {key for key, found in chosen.items() if found} == {
        (None, True, True, True),
        *((True, alone, copies, True) for alone in (True, False) for copies in (True, False)),
    }
    messages = {record.message.rpartition("exchanged")[2] for record in caplog.records}
    assert {" by copy engines (auto)", " by copy engines", ""} <= messages


def test_an_exchange_keeps_the_shape_that_layers_rely_on() -> None:
    def both(x: jax.Array) -> jax.Array:
        return jnp.stack([gather_tensor(x), lax.all_gather(x, "tensor")])

    x = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    for ours, theirs in np.asarray(over_tensor(both, 4)(x)):
        np.testing.assert_array_equal(ours, theirs)
