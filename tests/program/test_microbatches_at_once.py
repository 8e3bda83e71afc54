"""Microbatches computed side by side: the same step, and their number is taken from the config."""

import jax
import pytest

from jaxtron.program import Program
from tests.parity.harness import assert_parity, make_batch, make_config, reference, rows_of, run
from tests.program.forward import random_state


@pytest.mark.parametrize(
    "parallel, train",
    [
        # 8 microbatches in turns of three: the first turn has two
        ({"tensor": 2}, {"num_microbatches": 8, "microbatches_at_once": 3}),
        (
            {"fsdp": 2, "tensor": 2, "data_sharding": "optim_grads_params"},
            {"num_microbatches": 4, "microbatches_at_once": 2},
        ),
    ],
)
def test_a_step_is_that_of_one_microbatch_after_the_other(parallel: dict, train: dict) -> None:
    raw = {"train": {**train, "layer_loop": "unroll"}}
    plain = {"train": {"num_microbatches": train["num_microbatches"]}}
    devices = jax.devices()[: 2 * parallel.get("fsdp", 1)]
    assert_parity(run(parallel, devices, **raw), reference(**plain))


def test_one_turn_of_the_loop_holds_as_many_as_asked() -> None:
    def products(at_once: int) -> int:
        train = {"num_microbatches": 4, "microbatches_at_once": at_once, "layer_loop": "unroll"}
        config = make_config(model={"num_layers": 1}, train=train)
        program = Program(config, jax.devices()[:1])
        step = program.train_step.lower(random_state(program), rows_of(program, make_batch(config)))
        return step.compile().as_text().count(" dot(")

    one, two = products(1), products(2)
    assert one > 6
    assert two == 2 * one
