import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtron.optim.clip import clip_by_global_norm


def test_gradients_above_the_norm_are_scaled_to_it():
    grads = {"a": jnp.array([3.0, 0.0]), "b": {"c": jnp.array([[4.0]])}}
    clipped, norm = jax.jit(clip_by_global_norm, static_argnums=1)(grads, 2.5)
    assert float(norm) == 5.0
    np.testing.assert_allclose(clipped["a"], [1.5, 0.0], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"]["c"], [[2.0]], rtol=1e-6)


def test_the_coefficient_is_megatrons():
    clipped, _ = clip_by_global_norm([jnp.array([2e-6])], 1e-6)
    # 1e-6 / (2e-6 + 1e-6), not 1/2
    np.testing.assert_allclose(clipped[0], [2e-6 / 3], rtol=1e-5)


@pytest.mark.parametrize("max_norm", [0.0, 5.0, 6.0])
def test_gradients_within_the_norm_or_without_clipping_are_unchanged(max_norm: float):
    # 5 / (5 + 1e-6) is less than 1 but rounds to 1 in float32 up to the last bit
    grads = [jnp.array([3.0, -4.0])]
    clipped, norm = clip_by_global_norm(grads, max_norm)
    assert float(norm) == 5.0
    np.testing.assert_allclose(clipped[0], grads[0], rtol=3e-7)


def test_zero_gradients_stay_zero():
    clipped, norm = clip_by_global_norm([jnp.zeros(3)], 1.0)
    assert float(norm) == 0.0
    np.testing.assert_array_equal(clipped[0], 0.0)


@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e30])
def test_a_norm_that_is_not_finite_is_reported_and_hides_nothing(bad: float):
    grads = [jnp.array([bad, 1.0], jnp.float32)]
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert not np.isfinite(norm)
    np.testing.assert_array_equal(clipped[0], grads[0])


def test_the_norm_is_taken_in_float32_and_the_dtype_kept():
    grads = [jnp.full(4096, 0.01, jnp.bfloat16)]
    clipped, norm = clip_by_global_norm(grads, 0.1)
    assert float(norm) == pytest.approx(64 * float(grads[0][0]), rel=1e-5)
    assert clipped[0].dtype == jnp.bfloat16


def test_a_sharded_and_a_replicated_parameter_count_once():
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    sharded = jax.device_put(jnp.full(8, 1.0), NamedSharding(mesh, PartitionSpec("fsdp")))
    replicated = jax.device_put(jnp.full(1, 1.0), NamedSharding(mesh, PartitionSpec()))
    _, norm = jax.jit(clip_by_global_norm, static_argnums=1)([sharded, replicated], 1.0)
    assert float(norm) == 3.0
