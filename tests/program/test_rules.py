"""The table of logical axes: overrides that work give the same training, others are refused."""

import functools
import logging
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtron.errors import ConfigError
from jaxtron.mesh.axes import AXES
from jaxtron.mesh.mesh import make_mesh
from jaxtron.mesh.rules import make_rules
from jaxtron.program import Program
from tests.parity.harness import assert_close_leaves, make_batch, make_config, rows_of
from tests.program.forward import random_params

SIZES = dict(zip(AXES, (1, 2, 4, 1, 1, 8), strict=True))


@pytest.mark.parametrize(
    ("logical", "shape", "overrides", "spec"),
    [
        (("vocab", "embed"), (128, 64), {}, PartitionSpec(("tensor",), None)),
        (("embed", None, "mlp"), (64, 2, 32), {}, PartitionSpec(None, None, ("tensor",))),
        (("embed", None, "mlp"), (64, 2, 32), {"mlp": None}, PartitionSpec(None, None, None)),
        (("embed",), (64,), {"embed": "fsdp"}, PartitionSpec(("fsdp",))),
        (("embed",), (64,), {"embed": ["data", "fsdp"]}, PartitionSpec(("data", "fsdp"))),
        # fewer key/value heads than tensor are replicated
        (("embed", "kv_heads"), (64, 2), {}, PartitionSpec(None, None)),
        (("embed", "kv_heads"), (64, 16), {}, PartitionSpec(None, ("tensor",))),
    ],
)
def test_spec_follows_the_table(
    logical: Any, shape: Any, overrides: Any, spec: PartitionSpec
) -> None:
    assert make_rules(overrides, SIZES).spec(logical, shape) == spec


@pytest.mark.parametrize(
    ("overrides", "logical", "shape", "message"),
    [
        ({"mpl": None}, (), (), "parallel.rules.mpl: no such logical axis.*mlp"),
        ({"mlp": "tensr"}, (), (), "parallel.rules.mlp: no mesh axis 'tensr'.*tensor"),
        ({"zero": ["fsdp", "fsdp"]}, (), (), "parallel.rules.zero: a mesh axis stands twice"),
        (
            {"embed": "tensor"},
            ("embed", "mlp"),
            (64, 64),
            "mlp/up: mesh axis 'tensor' would split embed and mlp; change parallel.rules.embed",
        ),
        (
            {},
            ("vocab", "embed"),
            (100, 64),
            "mlp/up: dimension 'vocab' of size 100 cannot be split in 8 parts.*vocab -> tensor",
        ),
        ({}, ("kv_heads",), (3,), "dimension 'kv_heads' of size 3 cannot be split in 8 parts"),
    ],
)
def test_wrong_rules_are_refused_by_name(
    overrides: Any, logical: Any, shape: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_rules(overrides, SIZES).spec(logical, shape, "mlp/up")
    assert re.search(message, str(error.value).replace("'embed' and 'mlp'", "embed and mlp"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"embed": "tensor"}, "parallel.rules.embed is [tensor], but layers compute with embed"),
        ({"embed": "fsdp"}, "stored in more pieces by parallel.rules.zero"),
        ({"mlp": "fsdp"}, "parallel.rules.mlp is [fsdp]"),
        ({"layers": "fsdp"}, "parallel.rules.layers is [fsdp]"),
        ({"heads": None}, "set parallel.rules.kv_heads to null too"),
        ({"batch": ["data", "expert"]}, "must hold every axis that splits the batch"),
        ({"batch": ["data", "fsdp", "expert", "tensor"]}, "set it to [data, fsdp, expert]"),
        ({"sequence": "tensor"}, "parallel.rules.sequence is [tensor]"),
        ({"mpl": None}, "parallel.rules.mpl: no such logical axis"),
    ],
    ids=str,
)
def test_rules_that_layers_cannot_compute_with_are_refused(rules: Any, message: str) -> None:
    config = make_config(parallel={"data": 2, "fsdp": 2, "tensor": 2, "rules": rules})
    with pytest.raises(ConfigError, match=re.escape(message)):
        Program(config)


@pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "rules"),
    [
        (2, None, {"mlp": None, "vocab": None}),
        (4, False, {"heads": None, "kv_heads": None}),
        (2, None, {"kv_heads": None, "zero": ["data", "fsdp"], "batch": ["fsdp", "data"]}),
    ],
)
def test_gradients_do_not_depend_on_the_rules(
    tensor: int, sequence_parallel: bool | None, rules: Any
) -> None:
    program = ruled_program(
        data=2,
        fsdp=8 // (2 * tensor),
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        rules=rules,
    )
    logical = jax.tree.leaves(program.model.logical, is_leaf=lambda x: isinstance(x, tuple))
    specs = jax.tree.leaves(program.specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    for name in (name for name, axes in rules.items() if axes is None):
        holders = [(spec[n.index(name)] or ()) for n, spec in zip(logical, specs) if name in n]
        assert holders and all("tensor" not in axes for axes in holders)
    loss, grads = loss_and_gradients(program)
    expected_loss, expected = unruled()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close_leaves(grads, expected, 2e-5, "gradient")


def ruled_program(**parallel: Any) -> Program:
    config = make_config(
        model={"num_layers": 1, "num_query_groups": 4, "add_bias_linear": True},
        parallel=parallel,
        train={"global_batch_size": 8},
    )
    return Program(config, None if parallel else jax.devices()[:1])


def loss_and_gradients(program: Program) -> tuple[float, Any]:
    batch = rows_of(program, make_batch(program.config))
    loss, _, grads = jax.jit(program.loss_and_gradients)(random_params(program), batch)
    return float(loss), jax.tree.map(np.asarray, grads)


@functools.cache
def unruled() -> tuple[float, Any]:
    return loss_and_gradients(ruled_program())


@dataclass(frozen=True)
class Device:
    """Stands for a device of a job of several processes."""

    id: int
    process_index: int


def devices(processes: int, each: int) -> list[Any]:
    """All devices, in an order that mixes the processes."""
    all_devices = [Device(p * each + i, p) for p in range(processes) for i in range(each)]
    return [all_devices[i] for i in np.random.default_rng(0).permutation(len(all_devices))]


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_groups_stay_inside_a_process(tensor: int, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {**dict.fromkeys(AXES, 1), "data": 2, "fsdp": 16 // tensor, "tensor": tensor}
    with caplog.at_level(logging.WARNING):
        grid = make_mesh(sizes, devices(4, 8)).devices
    assert grid.shape == tuple(sizes.values())
    for group in grid.reshape(-1, tensor):
        assert len({device.process_index for device in group}) == 1
        assert [device.id for device in group] == sorted(device.id for device in group)
    assert not caplog.records


def test_a_tensor_group_over_hosts_is_named(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {**dict.fromkeys(AXES, 1), "tensor": 4}
    with caplog.at_level(logging.WARNING):
        make_mesh(sizes, devices(2, 2))
    assert "parallel.tensor=4: 1 tensor groups span several hosts" in caplog.text


def test_a_mesh_of_the_wrong_size_is_refused() -> None:
    sizes = {**dict.fromkeys(AXES, 1), "tensor": 3}
    with pytest.raises(ConfigError, match="needs 3 devices, the job has 8"):
        make_mesh(sizes)
