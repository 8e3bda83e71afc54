"""Growing batches: sizes, positions in the plans, refusals."""

import math

import numpy as np
import pytest

from jaxtron.config.batch_schedule import batch_schedule
from jaxtron.config.run import TrainConfig
from jaxtron.config.validate import validate_for_training
from jaxtron.errors import ConfigError
from jaxtron.optim.config import OptimizerConfig
from jaxtron.optim.schedule import learning_rate_schedule
from tests.parity.harness import make_config


def megatron_sizes(start: int, increment: int, samples: int, final: int, steps: int) -> list[int]:
    """Sizes by Megatron's rule, applied before every step to the samples consumed so far."""
    sizes, consumed = [], 0
    per_increment = samples / ((final - start) / increment)
    for _ in range(steps):
        over = consumed > samples
        sizes.append(final if over else start + int(consumed / per_increment) * increment)
        consumed += sizes[-1]
    return sizes


RAMPS = [(2, 2, 24, 8), (4, 4, 12, 32), (8, 8, 1000, 64), (1, 1, 5, 4), (16, 16, 3, 64)]


@pytest.mark.parametrize("ramp", RAMPS)
def test_sizes_are_megatrons(ramp: tuple[int, int, int, int]) -> None:
    *rampup, final = ramp
    schedule = batch_schedule(
        TrainConfig(steps=60, global_batch_size=final, rampup_batch_size=rampup)
    )
    expected = megatron_sizes(*ramp, steps=60)
    sizes = [schedule.samples(k + 1) - schedule.samples(k) for k in range(60)]
    assert sizes == expected
    for step in (0, 1, 7, 59, 60):
        rest = [size for size, count in schedule.rest(step, 60) for _ in range(count)]
        assert rest == expected[step:]


def test_the_learning_rate_counts_samples() -> None:
    """Megatron adds the batch size at every step: 8 full batches of warm-up are 64 samples."""
    train = TrainConfig(steps=40, global_batch_size=8, rampup_batch_size=[2, 2, 24])
    schedule = batch_schedule(train)
    optimizer = OptimizerConfig(lr=1.0, lr_warmup_steps=8, lr_decay_style="linear")
    length = schedule.plan_length(train.steps)
    lr = learning_rate_schedule(optimizer, total_steps=length, position=schedule.full_batches)
    consumed = np.cumsum([0, *megatron_sizes(2, 2, 24, 8, 40)])
    decay = 8 * length
    expected = [
        s / 64 if s <= 64 else max(0.0, 1 - (s - 64) / (decay - 64)) for s in consumed.tolist()
    ]
    assert length == -(-int(consumed[-1]) // 8)
    np.testing.assert_allclose([float(lr(n)) for n in range(41)], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("train", "parallel", "message"),
    [
        ({"rampup_batch_size": [2, 2]}, {}, "expected three numbers"),
        ({"rampup_batch_size": [2, 0, 5]}, {}, "expected three numbers"),
        ({"rampup_batch_size": [2, 4, 5]}, {}, "divides 32 - 2"),
        ({"rampup_batch_size": [64, 4, 5]}, {}, "does not arrive at train.global_batch_size 32"),
        ({"rampup_batch_size": [2, 2, 5], "num_microbatches": 1}, {}, "give train.micro_batch"),
        ({"rampup_batch_size": [2, 2, 5]}, {"fsdp": 4}, "must be multiples of.*= 4"),
        (
            {"rampup_batch_size": [2, 2, 99], "micro_batch_size": 2},
            {"pipeline": 2, "virtual_pipeline": 2, "pipeline_schedule": "interleaved"},
            "rampup_batch_size, at a batch of 2: .* a step has 1 microbatches",
        ),
    ],
)
def test_ramps_that_cannot_work_are_refused(train: dict, parallel: dict, message: str) -> None:
    sizes = [parallel.get(axis, 1) for axis in ("fsdp", "pipeline")]
    devices = math.prod(sizes)

    def check() -> None:
        config = make_config(train={"num_microbatches": None, **train}, parallel=parallel)
        validate_for_training(config, devices)

    with pytest.raises(ConfigError, match=message):
        check()
