"""Tensor-parallel blocks that work on parts as they arrive: values, derivatives, what is sent."""

import itertools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxtron.config.load import load_config
from jaxtron.log_once import log_once
from jaxtron.mesh.axes import AXES
from jaxtron.parallel.tensor_parts import cut, deliver, join, receive, works_on_parts
from tests.moe.arms import AHEAD, BIAS, LATENT, T_MOE
from tests.parity.harness import assert_parity, make_config, reference, run
from tests.program.collectives import collectives, count
from tests.program.meshes import mesh_of
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


@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_parts_arrive_from_the_member_behind_first(members: int) -> None:
    x = np.arange(members * 6, dtype=np.float32).reshape(members, 2, 3)
    got = np.asarray(over_tensor(lambda a: jnp.stack(receive(a)), members)(x))
    for own, back in itertools.product(range(members), repeat=2):
        np.testing.assert_array_equal(got[own, back], x[own - back])


@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_what_is_delivered_is_the_sum_of_all_members_terms(members: int) -> None:
    rng = np.random.default_rng(members)
    # terms[m, back]: what m has for the member `back` places behind it
    terms = rng.normal(size=(members, members, 2, 3)).astype(np.float32)
    got = np.asarray(over_tensor(lambda a: deliver(tuple(a)), members)(terms))
    for own in range(members):
        expected = sum(terms[m, (m - own) % members] for m in range(members))
        np.testing.assert_allclose(got[own], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_joined_parts_are_the_sequence_and_cut_ones_are_parts(members: int) -> None:
    rng = np.random.default_rng(members)
    whole = rng.normal(size=(2, 3 * members, 5)).astype(np.float32)
    x = np.stack(np.split(whole, members, axis=1))

    def joined(a: jax.Array) -> jax.Array:
        return join(receive(a))

    def back(a: jax.Array) -> jax.Array:
        return jnp.stack([p - q for p, q in zip(cut(joined(a)), receive(a), strict=True)])

    for member in np.asarray(over_tensor(joined, members)(x)):
        np.testing.assert_array_equal(member, whole)
    assert not np.asarray(over_tensor(back, members)(x)).any()


@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_derivatives_are_those_of_the_sum_over_devices(members: int) -> None:
    """Of ``sum over devices of weights * f(x)``, for whole sequences and for sums of them."""
    rng = np.random.default_rng(members)
    x = rng.normal(size=(members, 2, 3, 4)).astype(np.float32)
    weights = rng.normal(size=(members, 2, 3 * members, 4)).astype(np.float32)

    def pulled(a: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda a: jnp.sum(w * join(receive(a))))(a)

    expected = np.stack(np.split(weights.sum(0), members, axis=1))
    np.testing.assert_allclose(over_tensor(pulled, members)(x, weights), expected, rtol=1e-5)

    def pushed(w: jax.Array, a: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.sum(a * deliver(cut(w))))(w)

    whole = np.concatenate(x, axis=1)
    for member in np.asarray(over_tensor(pushed, members)(weights, x)):
        np.testing.assert_array_equal(member, whole)


def test_16_bit_terms_are_added_in_fp32() -> None:
    # 1 + 3 * 2^-9: in bf16 each term alone is lost
    terms = jnp.asarray([1, 2**-9, 2**-9, 2**-9, 0, 0, 0, 0], "bfloat16")
    each = jnp.broadcast_to(terms[:, None], (8, 8))
    summed = over_tensor(lambda a: deliver(tuple(a)), 8)(each)
    pulled = over_tensor(lambda a: jax.vjp(receive, a[0])[1](tuple(a))[0], 8)(each)
    exact = jnp.bfloat16(1 + 3 * 2**-9)
    assert exact > 1
    for found in (summed, pulled):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(found), exact)


@pytest.mark.parametrize(
    "parallel, train, model",
    [
        ({"tensor": 8}, {}, {}),
        ({"fsdp": 2, "tensor": 4}, {"num_microbatches": 2}, {}),
        ({"data": 2, "tensor": 2}, {"layer_loop": "scan"}, {}),
        ({"fsdp": 2, "context": 2, "tensor": 2}, {}, {}),
        ({"pipeline": 2, "tensor": 2}, {"num_microbatches": 4}, {}),
        ({"tensor": 4}, {"recompute": "full"}, {}),
        ({"tensor": 2}, {"recompute": {"gathered_sequence": "recompute"}}, {}),
        ({"tensor": 4, "fsdp": 2, "data_sharding": "optim_grads_params"}, {}, {}),
        ({"tensor": 2, "rules": {"heads": None, "kv_heads": None}}, {}, {}),
        ({"tensor": 2, "rules": {"mlp": None}}, {}, {"add_bias_linear": True}),
        ({"tensor": 2}, {}, {"qk_layernorm": True, "add_qkv_bias": True}),
        ({"tensor": 2, "expert": 2}, {}, {**T_MOE, **BIAS}),
        ({"tensor": 2, "expert": 2, "rules": {"expert_mlp": None}}, {}, T_MOE),
        ({"tensor": 4}, {}, {**T_MOE, **LATENT, **AHEAD}),
    ],
)
def test_a_step_equals_that_of_one_device(
    parallel: dict[str, Any], train: dict[str, Any], model: dict[str, Any]
) -> None:
    count = {k: v for k, v in train.items() if k == "num_microbatches"}
    devices = int(np.prod([parallel.get(axis, 1) for axis in AXES]))
    assert_parity(
        run(
            {**parallel, "tp_comm_overlap": True},
            jax.devices()[:devices],
            train=train,
            model=model,
        ),
        reference(train=count, model=model),
    )


@pytest.mark.parametrize(
    "parallel, precision",
    [
        ({"tensor": 2}, {"compute": "bf16"}),
        ({"tensor": 4, "fsdp": 2}, {"fp8_amax_scope": "global"}),
        ({"tensor": 8}, {}),
    ],
)
def test_fp8_products_of_parts_are_those_of_whole_sequences(
    parallel: dict[str, Any], precision: dict[str, Any]
) -> None:
    """But for sums in another order; a part's own scale would be off by a hundredth and more."""
    precision = {"fp8": "current", **precision}
    devices = jax.devices()[: int(np.prod(list(parallel.values())))]
    parts, whole = (
        run({**parallel, "tp_comm_overlap": in_parts}, devices, precision=precision)["grads"]
        for in_parts in (True, False)
    )
    for a, b in zip(*map(jax.tree.leaves, (parts, whole)), strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)


def test_a_step_sends_all_that_it_gathered_and_scattered() -> None:
    def found(asked: bool) -> Any:
        parallel = {"tensor": 8, "tp_comm_overlap": asked}
        return collectives(lower(make_config(model={"num_layers": 2}, parallel=parallel)))

    plain, sent = found(False), found(True)
    assert count(plain, "collective_permute") == {}
    assert count(sent, "all_gather") == count(sent, "reduce_scatter") == {}
    gathered, scattered = count(plain, "all_gather"), count(plain, "reduce_scatter")
    assert count(sent, "collective_permute") == {
        depth: 7 * (gathered.get(depth, 0) + scattered.get(depth, 0))
        for depth in gathered | scattered
    }


def decided(asked: str, mesh: Any, **given: bool) -> bool:
    overrides = ["parallel.tensor=2", f"parallel.tp_comm_overlap={asked}"]
    parallel = load_config({"preset": "tiny"}, overrides).parallel
    facts = {"sequence_parallel": True, "copies": True, **given}
    return works_on_parts(parallel, mesh, **facts)


@pytest.mark.parametrize(
    "mesh, given, expected",
    [
        (mesh_of(4, tensor=4), {}, True),
        (mesh_of(8, tensor=2, fsdp=2, context=2), {}, True),
        (mesh_of(4, tensor=4), {"copies": False}, False),
        (mesh_of(4, tensor=4), {"sequence_parallel": False}, False),
        (mesh_of(4, tensor=2, pipeline=2), {}, False),
        (mesh_of(4, tensor=4, data=2), {}, False),  # several processes
        (mesh_of(1, tensor=4), {}, False),
    ],
)
def test_null_is_on_where_copy_engines_send(
    mesh: Any, given: dict[str, bool], expected: bool
) -> None:
    assert decided("null", mesh, **given) is expected


def test_the_choice_is_said(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    one, two = mesh_of(4, tensor=4), mesh_of(2, tensor=2, data=2)
    with caplog.at_level(logging.INFO):
        assert decided("null", one)
        assert decided("true", one)
        assert decided("true", two)
        assert not decided("false", one)
    said = [record.message.rpartition("sent")[2] for record in caplog.records]
    assert said == [" by copy engines (auto)", " by copy engines", ""]
