"""Embedding and output layer add their gradients to the step's sums themselves where they can."""

from typing import Any

import jax
import pytest

from jaxtron.models.decoder import Decoder
from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.additions import additions
from tests.program.forward import random_params

BOTH = ("embedding/word", "output/weight")


@pytest.mark.parametrize(
    ("changes", "summed"),
    [
        ({}, BOTH),
        ({"parallel": {"fsdp": 2, "data_sharding": "optim"}}, BOTH),
        ({"parallel": {"fsdp": 2, "data_sharding": "optim_grads"}}, ()),
        ({"parallel": {"fsdp": 2, "data_sharding": "optim_grads_params"}}, ()),
        ({"model": {"untie_embeddings_and_output_weights": False}}, ()),
        ({"model": {"mtp_num_layers": 1}}, ()),
        ({"precision": {"grads": "bf16"}}, ()),
    ],
)
def test_which_gradients_are_sums(changes: dict[str, Any], summed: tuple[str, ...]) -> None:
    config = make_config(**changes)
    sizes = [getattr(config.parallel, axis) for axis in ("data", "fsdp")]
    program = Program(config, jax.devices()[: max(1, *[n or 1 for n in sizes])])
    assert program.plan.summed == summed


@pytest.mark.parametrize(("tied", "expected"), [(False, 1), (True, 3)])
def test_no_microbatch_adds_a_gradient_of_the_whole_vocabulary(tied: bool, expected: int) -> None:
    """But the output layer, a chunk of tokens to the sum, which XLA does within the GEMM.

    Tied, there are two more: of the two uses, and of that with the sum.
    """
    config = make_config(
        model={"untie_embeddings_and_output_weights": not tied},
        train={"num_microbatches": 4},
    )
    program = Program(config, jax.devices()[:1])
    batch = rows_of(program, make_batch(config))
    traced = jax.make_jaxpr(program.loss_and_gradients)(random_params(program), batch)
    assert additions(traced.jaxpr, (104, 64)) == expected


class LooksUpTwice(Decoder):
    def lookup(self, params: Any, fetch: Any, tokens: Any, inputs: Any) -> Any:
        return sum(
            super(LooksUpTwice, self).lookup(params, fetch, t, inputs) for t in (tokens, 0 * tokens)
        )


class UsesNoOutputWeight(Decoder):
    def output_weight(self, params: Any, fetch: Any) -> Any:
        weight = super().output_weight(params, fetch)
        return getattr(weight, "weight", weight)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (LooksUpTwice, "sums_itself names embedding/word.* and 2 do"),
        (UsesNoOutputWeight, "sums_itself names output/weight.* and 0 do"),
    ],
)
def test_a_model_that_uses_such_a_weight_otherwise_is_refused(
    model: Any, message: str, stages: int
) -> None:
    config = make_config(parallel={"pipeline": stages}, train={"num_microbatches": 4})
    program = Program(config, jax.devices()[:stages], model=model(config.model))
    batch = rows_of(program, make_batch(config))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(program.loss_and_gradients, random_params(program), batch)
