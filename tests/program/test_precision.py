"""bf16 arithmetic over fp32 weights, fp32 accumulation and fp32 optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.forward import random_params, random_state
from tests.program.scans import scans


def program_for(
    compute: str,
    parallel: dict[str, Any] | None = None,
    devices: int = 1,
    grads: str = "fp32",
    num_layers: int = 1,
    **train: Any,
) -> Program:
    config = make_config(
        model={"num_layers": num_layers},
        parallel=parallel,
        train={"global_batch_size": 8, **train},
        optimizer={"name": "adamw"},
        precision={"compute": compute, "grads": grads},
    )
    return Program(config, jax.devices()[:devices])


def test_bf16_loss_is_close_to_fp32_and_the_state_stays_fp32() -> None:
    losses = {}
    for compute in ("fp32", "bf16"):
        program = program_for(compute, {"tensor": 2}, 2)
        state = random_state(program, std=0.05)
        batch = rows_of(program, make_batch(program.config))
        state, metrics = program.train_step(state, batch)
        losses[compute] = float(metrics["loss"])
        for leaf in jax.tree.leaves((state["params"], state["opt_state"])):
            assert leaf.dtype in (jnp.float32, jnp.int32)
        assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float32
    assert losses["bf16"] != losses["fp32"]
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], atol=3e-2)


def gradients_of_equal_microbatches(
    level: str, count: int, grads: str = "fp32", stages: int = 1
) -> Any:
    program = program_for(
        "bf16",
        {"fsdp": 1, "data_sharding": level, "pipeline": stages},
        stages,
        num_layers=stages,
        grads=grads,
        global_batch_size=count,
        num_microbatches=count,
    )
    row = make_batch(make_config(), ragged=False)
    batch = {name: np.repeat(array[:1], count, axis=0) for name, array in row.items()}
    result = jax.jit(program.loss_and_gradients)(random_params(program), rows_of(program, batch))
    return jax.tree.map(np.asarray, result[2])


def test_gradients_are_accumulated_in_fp32() -> None:
    """64 equal microbatches add up to what two of them do, exactly.

    Each contributes the bf16 gradient g / 64 (a power of two), and k g / 64 has at most 14 bits:
    exact in fp32. A bf16 sum would round it from the third microbatch on. (One alone is another
    program, in which XLA may leave out other roundings to bf16.)
    """
    for level in ("optim", "optim_grads_params"):
        expected = jax.tree_util.tree_leaves_with_path(gradients_of_equal_microbatches(level, 2))
        actual = jax.tree.leaves(gradients_of_equal_microbatches(level, 64))
        for (path, one), many in zip(expected, actual, strict=True):
            # under `optim` embedding and output layer add to the sum what was never rounded to bf16
            rounded = ("embedding", "output") if level == "optim_grads_params" else ()
            if one.ndim > 2 or path[0].key in rounded:  # gradients of bf16 copies
                np.testing.assert_array_equal(many, one, err_msg=jax.tree_util.keystr(path))
            else:
                np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-8)


def rounded_sum(part: np.ndarray, count: int) -> np.ndarray:
    """``count`` times ``part``, rounded to bf16 after each addition."""
    total = np.zeros_like(part)
    for _ in range(count):
        total = np.asarray(jnp.asarray(total + part, jnp.bfloat16), np.float32)
    return total


def test_precision_grads_bf16_rounds_every_sum_over_microbatches() -> None:
    """64 equal microbatches, as above, against a sum in NumPy that is rounded to bf16 each time."""
    ones = gradients_of_equal_microbatches("optim", 1)["layers"]["mlp"]["down"]
    for level in ("optim", "optim_grads"):
        grads = gradients_of_equal_microbatches(level, 64, grads="bf16")
        many = grads["layers"]["mlp"]["down"]
        assert many.dtype == np.float32 and not np.array_equal(many, ones)
        np.testing.assert_array_equal(many, rounded_sum(ones / 64, 64))


def test_precision_grads_holds_on_both_stages_of_a_pipeline() -> None:
    """The sum in fp32 is exact, so that it tells what each microbatch adds."""
    exact = gradients_of_equal_microbatches("optim", 16, stages=2)["layers"]["mlp"]["down"]
    grads = gradients_of_equal_microbatches("optim", 16, grads="bf16", stages=2)
    many = grads["layers"]["mlp"]["down"]
    assert many.shape[0] == 2
    for stage in range(2):
        assert not np.array_equal(many[stage], exact[stage])
    np.testing.assert_array_equal(many, rounded_sum(exact / 16, 16))


def test_every_float_carried_over_microbatches_is_fp32() -> None:
    program = program_for("bf16", num_microbatches=4)
    batch = rows_of(program, make_batch(program.config))
    closed = jax.make_jaxpr(program.loss_and_gradients)(random_params(program), batch)
    (microbatches,) = scans(closed.jaxpr, length=4)
    count = len(jax.tree.leaves(program.model.shapes))
    floats = [aval for aval in microbatches.carried if jnp.issubdtype(aval.dtype, jnp.floating)]
    assert len(floats) == count + 1  # a gradient per parameter, and the loss
    assert {aval.dtype for aval in floats} == {jnp.dtype(jnp.float32)}
