"""train.recompute and loss.chunk_tokens on a GPU: fewer temporary bytes, the same gradients.

Run with ``pytest -m gpu tests/gpu/test_recompute.py -s`` to see the bytes.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.program import Program
from tests.parity.harness import assert_close_leaves, make_batch, make_config, rows_of
from tests.program.forward import random_params

MODEL = {
    "hidden_size": 512,
    "ffn_hidden_size": 2048,
    "max_position_embeddings": 1024,
}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "groups of two": {
        "recompute": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "first two layers": {
        "recompute": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
    "selective": {"recompute": "selective"},
    "recomputed by name": {"recompute": {"mlp_up": "recompute", "mlp_act": "recompute"}},
    "offloaded": {
        "recompute": {"mlp_up": "offload", "mlp_act": "offload"},
        "layer_loop": "scan",
    },
}


def measure(train: dict[str, Any], loss: dict[str, Any], vocab_size: int = 8192) -> tuple[int, Any]:
    """Temporary bytes of the device, and gradients."""
    config = make_config(
        model={**MODEL, "vocab_size": vocab_size},
        data={"seq_length": 1024},
        train={"global_batch_size": 4, "layer_loop": "unroll", **train},
        loss=loss,
    )
    program = Program(config, jax.devices()[:1])
    params, batch = random_params(program, std=0.02), rows_of(program, make_batch(config))
    function = jax.jit(program.loss_and_gradients).lower(params, batch).compile()
    gradients = jax.tree.map(np.asarray, function(params, batch)[2])
    return function.memory_analysis().temp_size_in_bytes, gradients


@functools.cache
def plain(loop: str) -> tuple[int, Any]:
    return measure({"recompute": "none", "layer_loop": loop}, {})


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputation_and_offload_lower_temporary_bytes(policy: str) -> None:
    before, expected = plain(POLICIES[policy].get("layer_loop", "unroll"))
    after, gradients = measure(POLICIES[policy], {})
    print(f"{policy}: {before / 2**20:.0f} MiB -> {after / 2**20:.0f} MiB")
    assert after < 0.97 * before
    assert_close_leaves(gradients, expected, 2e-5, "gradient")


@pytest.mark.gpu
def test_a_loss_in_chunks_lowers_temporary_bytes() -> None:
    # with fewer words the attention probabilities of a layer would be the larger part
    before, expected = measure({"recompute": "full"}, {"chunk_tokens": 4096}, 65536)
    after, gradients = measure({"recompute": "full"}, {"chunk_tokens": 512}, 65536)
    print(f"chunks: {before / 2**20:.0f} MiB -> {after / 2**20:.0f} MiB")
    assert after < 0.8 * before
    assert_close_leaves(gradients, expected, 2e-5, "gradient")
