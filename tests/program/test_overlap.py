"""Data-parallel collectives beside products: the same step, on where it can act, else refused."""

import jax
import pytest

from jaxtron.config.load import load_config
from jaxtron.errors import ConfigError
from jaxtron.mesh.axes import resolve_axes
from jaxtron.parallel.overlap import Overlap, plan_overlap
from jaxtron.program import Program
from tests.parity.harness import assert_parity, make_batch, make_config, reference, rows_of, run
from tests.program.forward import random_state
from tests.program.scans import scans

BOTH = {"overlap_param_gather": True, "overlap_grad_reduce": True}


@pytest.mark.parametrize(
    "parallel, train",
    [
        ({"fsdp": 2, "data": 2, **BOTH}, {"num_microbatches": 2}),
        (
            {"fsdp": 2, "tensor": 2, **BOTH},
            {"num_microbatches": 4, "microbatches_at_once": 2},
        ),
        (
            {"fsdp": 2, "data_sharding": "optim_grads", "overlap_param_gather": True},
            {"num_microbatches": 4},
        ),
    ],
)
def test_a_step_with_microbatches_outside_of_the_loop_is_the_same(
    parallel: dict, train: dict
) -> None:
    devices = jax.devices()[: 2 * parallel.get("data", 1) * parallel.get("tensor", 1)]
    raw = {"train": {**train, "layer_loop": "unroll"}}
    plain = {"train": {"num_microbatches": train["num_microbatches"]}}
    assert_parity(run(parallel, devices, **raw), reference(**plain))


@pytest.mark.parametrize(
    "gather, reduce, at_once, turns",
    [
        (True, False, 1, 7),
        (True, True, 2, 2),
        (False, False, 3, 2),  # the two that fill no turn stand before the loop
        (True, True, 3, 1),
    ],
)
def test_the_loop_runs_over_the_other_microbatches(
    gather: bool, reduce: bool, at_once: int, turns: int
) -> None:
    config = make_config(
        model={"num_layers": 1},
        parallel={"fsdp": 1, "overlap_param_gather": gather, "overlap_grad_reduce": reduce},
        train={"num_microbatches": 8, "microbatches_at_once": at_once, "layer_loop": "unroll"},
    )
    program = Program(config, jax.devices()[:1])
    traced = program.train_step.trace(random_state(program), rows_of(program, make_batch(config)))
    assert len(scans(traced.jaxpr.jaxpr, turns)) == 1


@pytest.mark.parametrize(
    "overrides, unroll, platform, expected",
    [
        (["parallel.fsdp=2"], True, "gpu", (True, True)),
        (["parallel.fsdp=2"], True, "cpu", (False, False)),
        (["parallel.fsdp=2"], False, "gpu", (False, False)),
        (["parallel.fsdp=1", "parallel.data=2"], True, "gpu", (False, True)),
        (["parallel.fsdp=1", "parallel.tensor=2"], True, "gpu", (False, False)),
        (["parallel.fsdp=2", "parallel.pipeline=2"], True, "gpu", (False, False)),
        (["parallel.fsdp=2", "parallel.data_sharding=optim_grads"], True, "gpu", (True, False)),
        (["parallel.fsdp=2", "parallel.data_sharding=no_shard"], True, "gpu", (False, True)),
        (["parallel.fsdp=2", "parallel.overlap_grad_reduce=false"], True, "gpu", (True, False)),
    ],
)
def test_null_is_on_where_something_can_be_hidden(
    overrides: list[str], unroll: bool, platform: str, expected: tuple[bool, bool]
) -> None:
    assert plan(overrides, unroll, platform) == Overlap(*expected)


def plan(overrides: list[str], unroll: bool, platform: str) -> Overlap:
    parallel = load_config({"preset": "tiny"}, overrides).parallel
    sizes = resolve_axes(
        parallel, parallel.fsdp * parallel.data * parallel.tensor * parallel.pipeline
    )
    return plan_overlap(parallel, sizes, unroll=unroll, platform=platform)


@pytest.mark.parametrize(
    "overrides, unroll, words",
    [
        (["parallel.overlap_grad_reduce=true"], False, "set train.layer_loop to unroll"),
        (
            ["parallel.overlap_grad_reduce=true", "parallel.data_sharding=optim_grads"],
            True,
            "optim_grads sums in every microbatch",
        ),
        (
            ["parallel.overlap_param_gather=true", "parallel.data_sharding=no_shard"],
            True,
            "no_shard gathers nothing before a step",
        ),
        (
            ["parallel.overlap_param_gather=true", "parallel.pipeline=2"],
            True,
            "parallel.pipeline is 2",
        ),
    ],
)
def test_it_is_refused_where_it_cannot_act(overrides: list[str], unroll: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan([*overrides, "parallel.fsdp=2"], unroll, "gpu")
