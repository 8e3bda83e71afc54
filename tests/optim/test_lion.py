import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.optimizer import make_optimizer


def test_ten_steps_follow_the_paper():
    config = OptimizerConfig(
        name="lion", lr=0.02, lr_decay_style="linear", weight_decay=0.3, lion_beta2=0.95
    )
    axes = {"matrix": ("embed", "mlp"), "vector": ("embed",)}
    rng = np.random.default_rng(0)
    params = {"matrix": rng.normal(size=(3, 4)), "vector": rng.normal(size=3)}
    moments = {name: np.zeros_like(p) for name, p in params.items()}
    optimizer = make_optimizer(config, total_steps=10, logical_axes=axes)
    ours = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    state = optimizer.init(ours)
    for step in range(10):
        grads = {name: rng.normal(size=p.shape) for name, p in params.items()}
        lr = 0.02 * (1 - step / 10)
        for name, grad in grads.items():
            sign = np.sign(0.9 * moments[name] + 0.1 * grad)
            moments[name] = 0.95 * moments[name] + 0.05 * grad
            decay = 0.3 if name == "matrix" else 0.0
            params[name] = params[name] - lr * (sign + decay * params[name])
        updates, state = optimizer.update(
            jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads), state, ours
        )
        ours = optax.apply_updates(ours, updates)
    for name, want in params.items():
        np.testing.assert_allclose(ours[name], want, rtol=1e-5, atol=1e-6)
