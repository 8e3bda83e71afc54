"""Runs in fp16: the loss scale is part of the state, and of the record."""

import numpy as np

from tests.trainer.runs import assert_bitwise, make_config, make_trainer, saved_state, steps

# The scale halves until the gradients fit, then doubles every other step.
FP16 = {
    "compute": "fp16",
    "initial_loss_scale": 2.0**21,
    "loss_scale_window": 2,
    "hysteresis": 1,
}
ALONE = {"num_microbatches": 1}


def test_a_resumed_run_goes_on_with_its_loss_scale_bitwise(tmp_path) -> None:
    whole = make_config(tmp_path / "whole", precision=FP16)
    result = make_trainer(whole).fit()
    cut = make_config(tmp_path / "cut", precision=FP16, train={**ALONE, "exit_interval": 3})
    make_trainer(cut).fit()
    trainer = make_trainer(cut)
    assert trainer.fit().step == 6
    expected = saved_state(tmp_path / "whole", trainer, 6)
    assert_bitwise(saved_state(tmp_path / "cut", trainer, 6), expected)
    lines = steps(tmp_path / "cut")
    scales = [line["loss_scale"] for line in lines]
    assert scales == [line["loss_scale"] for line in steps(tmp_path / "whole")]
    assert len(set(scales)) > 1 and {line["skipped"] for line in lines} == {0, 1}
    assert expected["['updates']"] == sum(1 - line["skipped"] for line in lines)
    assert result.skipped == sum(line["skipped"] for line in lines)


def test_a_run_without_loss_scale_goes_on_in_fp16_from_the_first_scale(tmp_path) -> None:
    make_trainer(make_config(tmp_path, train={**ALONE, "exit_interval": 3})).fit()
    fp16 = make_config(tmp_path, precision={**FP16, "initial_loss_scale": 64.0})
    assert make_trainer(fp16).fit().step == 6
    np.testing.assert_array_equal(
        [r.get("loss_scale") for r in steps(tmp_path)][:4], [None, None, None, 64.0]
    )
