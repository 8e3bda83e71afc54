import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.errors import ConfigError
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.schedule import learning_rate_schedule


def schedule(total_steps: int = 100, **changes: Any):
    fields = {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 10, **changes}
    return learning_rate_schedule(OptimizerConfig(**fields), total_steps=total_steps)


def test_cosine_with_warm_up_has_the_closed_form_values():
    lr = schedule()
    expected = {
        0: 0.0,
        5: 5.0e-4,
        10: 1e-3,
        40: 7.75e-4,
        55: 5.5e-4,
        100: 1e-4,
        110: 1e-4,
    }
    for step, value in expected.items():
        assert float(lr(step)) == pytest.approx(value, rel=1e-6, abs=0), step


@pytest.mark.parametrize(("lr", "min_lr"), [(1e-3, 1e-4), (3e-4, 3e-5), (3e-4, 7e-5), (6e-4, 1e-5)])
@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_values_where_a_phase_begins_or_ends_are_exact(style: str, lr: float, min_lr: float):
    values = schedule(lr=lr, min_lr=min_lr, lr_warmup_init=min_lr / 3, lr_decay_style=style)
    expected = [np.float32(x) for x in (min_lr / 3, lr, min_lr, min_lr)]
    assert [np.float32(values(n)) for n in (0, 10, 100, 101)] == expected


def test_an_overridden_plan_gives_its_own_values_at_the_same_steps():
    lr = schedule(lr=5e-4, min_lr=5e-5)
    assert float(lr(40)) == pytest.approx(3.875e-4, rel=1e-6)
    assert float(lr(55)) == pytest.approx(2.75e-4, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"lr_decay_style": "constant"}, {0: 0, 5: 5e-4, 10: 1e-3, 99: 1e-3, 500: 1e-3}),
        ({"lr_decay_style": "linear"}, {10: 1e-3, 55: 5.5e-4, 77.5: 3.25e-4, 100: 1e-4, 101: 1e-4}),
        (
            {"lr_decay_style": "inverse-square-root"},
            {5: 5e-4, 10: 1e-3, 40: 5e-4, 90: 1e-3 / 3, 101: 1e-4},
        ),
        # the floor of inverse-square-root: 1e-3 sqrt(10 / 1440) is under 1e-4
        (
            {"lr_decay_style": "inverse-square-root", "lr_decay_steps": 2000},
            {640: 1.25e-4, 1440: 1e-4},
        ),
        # no warm-up: sqrt(max(W, 1) / max(n, 1))
        (
            {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 0},
            {0: 1e-3, 1: 1e-3, 4: 5e-4},
        ),
        ({"lr_warmup_steps": 0}, {0: 1e-3, 50: 5.5e-4}),
        ({"lr_warmup_init": 2e-4}, {0: 2e-4, 5: 6e-4, 10: 1e-3}),
        ({"lr_decay_steps": 50}, {30: 5.5e-4, 50: 1e-4, 80: 1e-4}),
    ],
)
def test_other_forms_have_their_closed_form_values(changes: dict, values: dict):
    lr = schedule(**changes)
    for step, value in values.items():
        assert float(lr(jnp.float32(step))) == pytest.approx(value, rel=2e-6, abs=0), step


@pytest.mark.parametrize(
    ("style", "half", "quarter"),
    [
        ("linear", 0.5, 0.75),
        ("cosine", 0.5, (math.cos(math.pi / 4) + 1) / 2),
        ("exponential", 2 * 0.5**0.5 - 1, 2 * 0.5**0.25 - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5), 0.5),
    ],
)
def test_wsd_is_stable_and_then_decays(style: str, half: float, quarter: float):
    lr = schedule(lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_steps=40)
    for step, coefficient in {10: 1, 35: 1, 60: 1, 70: quarter, 80: half, 100: 0, 120: 0}.items():
        assert float(lr(step)) == pytest.approx(1e-4 + coefficient * 9e-4, rel=2e-6), step


def test_the_count_may_be_traced_and_an_array():
    lr = jax.jit(schedule())(jnp.array([5, 55, 110], jnp.int32))
    assert lr.dtype == jnp.float32
    np.testing.assert_allclose(lr, [5e-4, 5.5e-4, 1e-4], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_warmup_steps": 100}, "lr_warmup_steps=100.*100 .train.steps."),
        ({"lr_warmup_steps": 30, "lr_decay_steps": 20}, "20 .optimizer.lr_decay_steps."),
        ({"min_lr": 2e-3}, "min_lr=0.002 is larger"),
        ({"lr_warmup_init": 2e-3}, "lr_warmup_init=0.002 is larger"),
        ({"lr_decay_style": "WSD"}, "needs optimizer.lr_wsd_decay_steps"),
        ({"lr_wsd_decay_steps": 5}, "no meaning with optimizer.lr_decay_style=cosine"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_steps": 95}, "95 is longer than the 100"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        schedule(**changes)


def test_a_warm_up_longer_than_the_run_is_fine_without_decay():
    assert float(schedule(total_steps=5, lr_decay_style="constant")(5)) == pytest.approx(5e-4)


def test_a_run_of_no_steps_has_a_schedule():
    assert np.isfinite(float(schedule(total_steps=0, lr_warmup_steps=0)(0)))
