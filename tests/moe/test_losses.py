"""Auxiliary losses equal their closed forms (NumPy, float64), with padding left out."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.layers.moe.losses import balancing_loss, count_choices, z_loss
from jaxtron.mesh.axes import AXES
from jaxtron.parallel.region import Region

ONE = Region(dict.fromkeys(AXES, 1), False)
B, S, E, K = 3, 7, 5, 2


def example():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(B, S, E))
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    experts = np.argsort(-logits, axis=-1)[..., :K]
    live = np.ones((B, S), bool)
    live[0, 4:] = False
    live[2] = False
    return logits, scores, experts, live


def test_counts_are_of_live_tokens() -> None:
    _, _, experts, live = example()
    counts = count_choices(jnp.asarray(experts), jnp.asarray(live), E)
    for b in range(B):
        for e in range(E):
            assert counts[b, e] == np.sum((experts[b] == e).any(-1) & live[b])


@pytest.mark.parametrize("unit", ["microbatch", "sequence"])
def test_balancing_loss(unit: str) -> None:
    _, scores, experts, live = example()
    weights = live / live.sum()
    piece = balancing_loss(
        jnp.asarray(scores, jnp.float32),
        count_choices(jnp.asarray(experts), jnp.asarray(live), E),
        jnp.asarray(weights, jnp.float32),
        topk=K,
        region=ONE,
        axes=(),
        over_rows=unit == "microbatch",
    )

    def closed_form(rows: list[int]) -> float:
        tokens = live[rows].sum()
        p = scores[rows][live[rows]].sum(0)
        n = np.array([(experts[rows][live[rows]] == e).sum() for e in range(E)])
        return E / (K * tokens**2) * np.sum(p * n)

    if unit == "microbatch":
        expected = closed_form([0, 1, 2])
    else:  # rows 0 and 1 have 4 and 7 live tokens, row 2 none
        expected = (4 * closed_form([0]) + 7 * closed_form([1])) / 11
    np.testing.assert_allclose(float(piece), expected, rtol=1e-6)


def test_balanced_loads_give_a_loss_of_one() -> None:
    experts = np.arange(10).reshape(1, 5, 2) % 5
    piece = balancing_loss(
        jnp.full((1, 5, 5), 0.2),
        count_choices(jnp.asarray(experts), jnp.ones((1, 5), bool), 5),
        jnp.full((1, 5), 0.2),
        topk=2,
        region=ONE,
        axes=(),
        over_rows=True,
    )
    np.testing.assert_allclose(float(piece), 1.0, rtol=1e-6)


def test_z_loss() -> None:
    logits, _, _, live = example()
    piece = z_loss(jnp.asarray(logits, jnp.float32), jnp.asarray(live / live.sum(), jnp.float32))
    expected = np.mean(np.log(np.exp(logits).sum(-1))[live] ** 2)
    np.testing.assert_allclose(float(piece), expected, rtol=1e-6)
