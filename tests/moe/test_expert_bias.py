"""The bias that balances without a loss."""

import jax.numpy as jnp
import numpy as np

from jaxtron.layers.moe.expert_bias import join_buffers, split_buffers, update_bias


def test_the_bias_moves_against_the_load_by_the_rate() -> None:
    bias = jnp.array([[0.0, 1.0, -1.0, 0.5]])
    load = jnp.array([[5, 1, 3, 3]], jnp.int32)  # mean 3
    new = update_bias(bias, load, 0.25)
    np.testing.assert_array_equal(new, [[-0.25, 1.25, -1.0, 0.5]])


def test_buffers_are_cut_out_and_joined() -> None:
    tree = {
        "layers": {"moe": {"router": {"weight": 1, "expert_bias": 2}}, "norm": {"w": 3}},
        "o": 4,
    }
    trained, buffers = split_buffers(tree)
    assert trained == {"layers": {"moe": {"router": {"weight": 1}}, "norm": {"w": 3}}, "o": 4}
    assert buffers == {"layers": {"moe": {"router": {"expert_bias": 2}}}}
    assert join_buffers(trained, buffers) == tree
    assert split_buffers({"a": {"b": 1}}) == ({"a": {"b": 1}}, {})
