"""fp32 residual stream, rounded logits, and infinite logits at masked positions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.layers.cross_entropy import CrossEntropy
from jaxtron.parallel.region import Region
from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.forward import hidden, random_state


def constant_updates(program: Program) -> Any:
    """Stream of ones to which each of the 2 blocks of a layer adds 2^-10 in the first feature."""

    def value(path: Any, leaf: Any, sharding: Any) -> jax.Array:
        name, array = jax.tree_util.keystr(path), np.zeros(leaf.shape, np.float32)
        if "word" in name or ("norm" in name and path[-1].key == "weight"):
            array[:] = 1
        if "output_bias" in name or "down_bias" in name:
            array[:, 0] = 2.0**-10
        return jax.device_put(array, sharding)

    return jax.tree_util.tree_map_with_path(
        value, program.model.shapes, program.state_shardings["params"]
    )


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("fp32", [False, True])
def test_small_updates_add_up_in_an_fp32_stream_alone(fp32: bool, tensor: int) -> None:
    """Eight times 2^-10 are 2^-7, which bf16 resolves at 1; one of them it does not.

    The final norm divides by 1.0001, which rounds away.
    """
    config = make_config(
        model={"add_bias_linear": True, "fp32_residual_connection": fp32},
        parallel={"tensor": tensor},
        train={"global_batch_size": 1},
        precision={"compute": "bf16"},
    )
    program = Program(config, jax.devices()[:tensor])
    out = hidden(program, constant_updates(program), make_batch(config, ragged=False))
    assert out.dtype == jnp.bfloat16
    out = np.asarray(out, np.float32)
    assert np.all(out[..., 0] == (1 + 2.0**-7 if fp32 else 1.0))
    assert np.all(out[..., 1:] == 1.0)


def test_logits_are_rounded_before_an_fp32_softmax() -> None:
    rng = np.random.default_rng(3)
    # eighths: exact in bf16, and so are their sums of products in fp32
    x, weight = (rng.integers(-12, 13, shape) / 8 for shape in ((6, 16), (50, 16)))
    labels = rng.integers(0, 50, 6)
    exact = x @ weight.T
    rounded = np.asarray(jnp.bfloat16(exact), np.float64)
    losses = {}
    for name, logits in (("float32", exact), ("bfloat16", rounded)):
        region = Region(dict.fromkeys(("pipeline", "context", "tensor"), 1), False)
        ce = CrossEntropy(region=region, vocab_size=50, logits_dtype=jnp.dtype(name))
        args = (jnp.bfloat16(x), jnp.bfloat16(weight), labels, jnp.full(6, 1 / 6))
        losses[name] = float(ce(*args)[1])
        nll = np.log(np.exp(logits).sum(1)) - logits[np.arange(6), labels]
        np.testing.assert_allclose(losses[name], nll.mean(), rtol=1e-6)
    assert abs(losses["float32"] - losses["bfloat16"]) > 1e-5


def test_precision_logits_reaches_the_loss() -> None:
    losses = []
    for logits in ("fp32", "bf16"):
        config = make_config(
            model={"num_layers": 1}, train={"global_batch_size": 1}, precision={"logits": logits}
        )
        program = Program(config, jax.devices()[:1])
        params = random_state(program)["params"]
        batch = rows_of(program, make_batch(config, ragged=False))
        losses.append(float(jax.jit(program.loss_and_gradients)(params, batch)[0]))
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2)


@pytest.mark.parametrize("tensor", [1, 2])
def test_infinite_logits_at_masked_positions_do_not_leak(tensor: int) -> None:
    """Word 68 alone has the first feature, and only the output row of word 3 reads it: 8e38 = inf.

    The layers add nothing. Every position of word 68 is masked, so its loss is not asked for.
    """
    config = make_config(
        model={"num_layers": 1},
        parallel={"tensor": tensor},
        train={"global_batch_size": 2},
    )
    program = Program(config, jax.devices()[:tensor])
    batch = make_batch(config, ragged=False)
    assert np.any(batch["tokens"] == 68)
    batch["loss_mask"][batch["tokens"] == 68] = 0
    params = jax.tree.map(np.array, random_state(program)["params"])
    params["layers"] = jax.tree.map(np.zeros_like, params["layers"])
    word = params["embedding"]["word"]
    word[:, 0], word[68], word[68, 0] = 0, 0, 1
    results = []
    for value in (0.0, 1e38):
        params["output"]["weight"][3, 0] = value
        placed = jax.tree.map(jax.device_put, params, program.state_shardings["params"])
        results.append(jax.jit(program.loss_and_gradients)(placed, rows_of(program, batch)))
    assert float(results[0][0]) == float(results[1][0]) > 0
    for leaf in jax.tree.leaves(results[1][2]):
        assert np.all(np.isfinite(leaf))
