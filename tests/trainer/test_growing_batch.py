"""train.rampup_batch_size: the same data order in batches that grow, also across a resume."""

import numpy as np

from tests.trainer.runs import (
    assert_bitwise,
    make_config,
    make_trainer,
    saved_state,
    steps,
)

# Consumed before each step: 0 2 4 8 14 22; every 4 samples up to 12 add 2 rows.
RAMP = {"num_microbatches": None, "micro_batch_size": 2, "rampup_batch_size": [2, 2, 12]}
SIZES = [2, 2, 4, 6, 8, 8]


def test_batches_grow_over_the_same_order_and_resume_within_the_ramp(tmp_path) -> None:
    whole = make_trainer(make_config(tmp_path / "whole", train=RAMP))
    rows = [whole.datasets.train[k]["tokens"] for k in range(sum(SIZES))]
    read = [batch["tokens"] for batch in whole._train_batches(0, 0)]
    assert [len(batch) for batch in read] == SIZES
    np.testing.assert_array_equal(np.concatenate(read), rows)

    whole.fit()
    compiled = whole.program.train_step._cache_size()
    cut = make_config(tmp_path / "cut", train={**RAMP, "exit_interval": 3})
    for _ in range(2):
        trainer = make_trainer(cut)
        trainer.fit()
    expected = saved_state(tmp_path / "whole", trainer, 6)
    assert_bitwise(saved_state(tmp_path / "cut", trainer, 6), expected)
    lines = steps(tmp_path / "cut")
    assert [line["global_batch_size"] for line in lines] == SIZES
    assert [line["consumed_samples"] for line in lines] == np.cumsum(SIZES).tolist()
    assert [line["lr"] for line in lines] == [line["lr"] for line in steps(tmp_path / "whole")]
    assert compiled == len(set(SIZES))  # one program a size
