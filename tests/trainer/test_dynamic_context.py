"""A run with dynamic context parallelism: resumes, evaluates, and counts real tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.runs import evaluations, make_config, make_trainer, saved_digests, steps

EOD = 3  # a word of the corpus: documents of many lengths
SECTIONS: dict[str, Any] = {
    "parallel": {"context": 2, "context_strategy": "ring", "data": 2},
    "data": {"eod_token": EOD, "reset_attention_mask": True, "reset_position_ids": True},
    "model": {"num_layers": 1},
    "train": {"num_microbatches": None},
    "eval": {"interval": 3, "iters": 1},
}


def launch(folder: Path, dynamic: bool, others: dict[str, Any] | None = None, **train: Any) -> None:
    sections = {
        **SECTIONS,
        "parallel": {**SECTIONS["parallel"], "dynamic_context": dynamic},
        "train": {**SECTIONS["train"], **train},
        **(others or {}),
    }
    make_trainer(make_config(folder, **sections)).fit()


def test_a_run_resumes_bitwise_and_equals_the_run_with_one_degree(tmp_path: Path) -> None:
    whole, parts, static = (tmp_path / name for name in ("whole", "parts", "static"))
    for folder in (whole, parts, static):
        folder.mkdir()
    launch(whole, True)
    launch(parts, True, exit_interval=3)
    launch(parts, True)
    launch(static, False)
    assert saved_digests(parts, 6) == saved_digests(whole, 6)
    assert [r["consumed_samples"] for r in steps(parts)] == [8, 16, 24, 32, 40, 48]
    for dynamic, plain in zip(steps(whole), steps(static), strict=True):
        np.testing.assert_allclose(dynamic["loss"], plain["loss"], rtol=1e-5)
        np.testing.assert_allclose(dynamic["grad_norm"], plain["grad_norm"], rtol=1e-4)
        for name in ("tokens", "valid_tokens", "consumed_samples", "causal_keys", "full_keys"):
            assert dynamic[name] == plain[name], name
        # the corpus is trained on every token, and its rows are full
        assert dynamic["tokens"] == dynamic["valid_tokens"] == 8 * 16
    for a, b in zip(evaluations(whole), evaluations(static), strict=True):
        np.testing.assert_allclose(a["eval_loss"], b["eval_loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        ({"compute": "fp16", "initial_loss_scale": 2.0**21, "hysteresis": 1}, 1e-3),
        ({"fp8": "current", "fp8_amax_scope": "global"}, 3e-3),
    ],
    ids=["fp16", "fp8"],
)
def test_in_few_bits_with_a_growing_batch_and_offloaded_moments_it_trains_alike(
    precision: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    """A product's rows have other scales in other microbatches: FP8 is equal but for rounding."""
    others = {"precision": precision, "optimizer": {"offload": True}}
    for name in ("dynamic", "static"):
        (tmp_path / name).mkdir()
        launch(tmp_path / name, name == "dynamic", others, rampup_batch_size=[2, 2, 12])
    dynamic, static = steps(tmp_path / "dynamic"), steps(tmp_path / "static")
    assert [r["global_batch_size"] for r in dynamic] == [2, 2, 4, 6, 8, 8]
    for a, b in zip(dynamic, static, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=tolerance)
        for key in {"skipped", "tokens", "consumed_samples", "loss_scale"} & a.keys():
            assert a[key] == b[key], key
    if "compute" in precision:
        assert {r["skipped"] for r in dynamic} == {0, 1}
