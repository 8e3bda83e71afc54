"""Sums of gradients over devices: what travels, that the sums are exact, and refusals."""

import logging
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxtron.config.load import load_config
from jaxtron.errors import ConfigError
from jaxtron.log_once import log_once
from jaxtron.mesh.mesh import within_host
from jaxtron.parallel.reduction import Reduction, plan_reduction
from tests.parity.harness import make_config, run
from tests.program.collectives import collectives
from tests.program.test_data_sharding import lower

FP32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
KEY = "reduce_scatter_with_fp32_accumulation"


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("axes", [("fsdp",), ("data",), ("data", "fsdp")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_add_up_to_the_scattered_sum_in_fp32(
    axes: tuple[str, ...], dim: int, dtype: str
) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    # of very different sizes: added in 16 bits they would lose their last digits
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(2, 4, 16, 8, 24)) * 2.0 ** rng.integers(
        -8, 4, size=(2, 4, 1, 1, 1)
    )
    gradients = np.asarray(jnp.asarray(gradients, dtype).astype(jnp.float32))
    names = ("data", "fsdp")
    spec = [None] * 3
    spec[dim] = axes

    def scattered(exchange: bool) -> np.ndarray:
        reduction = Reduction(FP32, exchange)

        def local(g: jax.Array) -> jax.Array:
            return reduction.scatter(g[0, 0].astype(dtype), axes, dim)[None]

        rest = tuple(name for name in names if name not in axes)
        out = PartitionSpec(rest or None, *spec)
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=PartitionSpec(*names), out_specs=out, check_vma=False
        )
        return np.asarray(jax.jit(mapped)(jnp.asarray(gradients)))

    summed = tuple(names.index(name) for name in axes)
    expected = gradients.astype(np.float64).sum(summed, keepdims=False)
    expected = expected.reshape(-1, 16, 8, 24)
    for exchange in (True, False):
        np.testing.assert_allclose(scattered(exchange), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", ["optim", "optim_grads", "optim_grads_params"])
def test_16_bit_gradients_travel_as_they_are(level: str) -> None:
    config = make_config(
        model={"num_layers": 1},
        parallel={"data": 2, "fsdp": 4, "data_sharding": level},
        precision={"compute": "bf16"},
    )
    found = collectives(lower(config))
    assert {key[2] for key in found if key[0] == "all_to_all"} == {"bf16"}
    assert not any(key[0] == "reduce_scatter" for key in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"num_microbatches": 2}},  # added up in fp32 before they travel
        {"precision": {"compute": "bf16", "grad_reduce": "bf16"}},
        {"precision": {"compute": "fp32"}},
    ],
)
def test_others_are_reduced_and_scattered(changes: dict[str, Any]) -> None:
    raw = {"precision": {"compute": "bf16"}, **changes}
    found = collectives(lower(make_config(model={"num_layers": 1}, parallel={"fsdp": 8}, **raw)))
    assert not any(key[0] == "all_to_all" for key in found)
    assert any(key[0] == "reduce_scatter" for key in found)


@pytest.mark.parametrize("shards", [2, 4])
def test_a_step_in_bf16_has_the_same_gradients_by_both(shards: int) -> None:
    results = [
        run({"fsdp": shards, KEY: exchange}, jax.devices()[:shards], precision={"compute": "bf16"})
        for exchange in (True, False)
    ]
    for a, b in zip(*(jax.tree.leaves(result["grads"]) for result in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "overrides, expected, words",
    [
        ([], True, "bf16 parts are exchanged and added in fp32 (auto)"),
        (["parallel.data_sharding=optim_grads", "parallel.pipeline=2"], False, "2 pipeline stages"),
        ([f"parallel.{KEY}=false"], False, "gradients over fsdp: reduce-scatter in fp32"),
        (
            ["parallel.data_sharding=optim_grads", "parallel.pipeline=2", f"parallel.{KEY}=true"],
            True,
            "bf16 parts are exchanged and added in fp32",
        ),
    ],
)
def test_null_is_decided_and_said(
    overrides: list[str], expected: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    config = load_config({"preset": "tiny"}, ["precision.compute=bf16", *overrides])
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    with caplog.at_level(logging.INFO):
        found = plan_reduction(config.parallel, config.precision, mesh, ("fsdp",), microbatches=1)
    assert found == Reduction(FP32, expected)
    assert words in caplog.text


class Cpu(NamedTuple):
    process_index: int


class Gpu(NamedTuple):
    process_index: int
    slice_index: int


@pytest.mark.parametrize(
    "shape, per_host, axes, expected",
    [
        ((1, 8), 4, ("fsdp",), False),
        ((2, 4), 4, ("fsdp",), True),
        ((2, 4), 4, ("data",), False),
        ((2, 4), 4, ("data", "fsdp"), False),
        ((2, 4), 8, ("data", "fsdp"), True),
        ((2, 4), 1, ("fsdp",), False),
        ((2, 4), 1, (), True),
    ],
)
def test_devices_of_one_host(
    shape: tuple[int, int], per_host: int, axes: tuple[str, ...], expected: bool
) -> None:
    """Of hosts with one process each, and with one a GPU, which XLA's slices tell apart."""
    for device in (lambda n: Cpu(n // per_host), lambda n: Gpu(n, n // per_host)):
        devices = np.empty(8, object)
        for n in range(8):
            devices[n] = device(n)
        grid = SimpleNamespace(
            axis_names=("data", "fsdp"),
            devices=devices.reshape(shape),
            shape=dict(zip(("data", "fsdp"), shape, strict=True)),
        )
        assert within_host(grid, axes) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "overrides, microbatches, words",
    [
        (["parallel.data_sharding=no_shard"], 1, "no_shard, which scatters nothing"),
        (["precision.compute=fp32"], 1, "precision.compute is fp32"),
        (["precision.grad_reduce=bf16"], 1, "precision.grad_reduce is bf16"),
        ([], 4, "a step's 4 microbatches are added up in fp32"),
        ([], None, "a step's many microbatches are added up in fp32"),
        (["parallel.pipeline=2"], 1, "parallel.pipeline adds up"),
        (["precision.grads=bf16"], 4, None),
        (["parallel.data_sharding=optim_grads"], 4, None),
    ],
)
def test_true_is_refused_where_all_gradients_are_fp32(
    overrides: list[str], microbatches: int | None, words: str | None
) -> None:
    start = ["precision.compute=bf16", f"parallel.{KEY}=true"]
    config = load_config({"preset": "tiny"}, [*start, *overrides])
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))

    def plan() -> Reduction:
        return plan_reduction(
            config.parallel, config.precision, mesh, ("fsdp",), microbatches=microbatches
        )

    if words is None:
        assert plan() == Reduction(FP32, True)
        return
    with pytest.raises(ConfigError, match=words):
        plan()
