"""Two thousand steps with evaluations, saves and two resumes: nothing grows, nothing slows down."""

import gc

import jax
import numpy as np
import pytest

from tests.trainer.runs import evaluations, make_config, make_trainer, steps


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
def test_two_thousand_steps_keep_memory_and_step_time(tmp_path, capsys) -> None:
    config = make_config(
        tmp_path,
        data={"dataloader_type": "cyclic"},
        train={"steps": 2000, "exit_interval": 700, "num_microbatches": 2},
        optimizer={"lr_decay_steps": 2000, "lr_warmup_steps": 20},
        eval={"interval": 250, "iters": 1},
        checkpoint={"dir": str(tmp_path / "checkpoints"), "interval": 500, "keep": 2},
    )
    kept, live = [], []
    for end in (700, 1400, 2000):
        trainer = make_trainer(config)
        assert trainer.fit().step == end
        program = trainer.program
        del trainer
        kept.append(live_bytes())
        live.append((program.train_step._cache_size(), program.eval_step._cache_size()))
    # The first launch's state comes from init and the others' from a checkpoint: the same program.
    assert live == [(1, 1)] * 3
    assert kept[2] == kept[1]

    lines = steps(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 2001))
    assert [line["step"] for line in evaluations(tmp_path)] == [
        *(250, 500, 700, 750, 1000, 1250, 1400, 1500, 1750, 2000)
    ]
    rss = np.array([line["host_rss_bytes"] for line in lines]) / 2**20
    seconds = np.array([line["step_time_s"] for line in lines])
    parts = {
        "201-600": slice(200, 600),
        "801-1300": slice(800, 1300),
        "1501-2000": slice(1500, None),
    }
    medians = {name: float(np.median(seconds[part])) for name, part in parts.items()}
    with capsys.disabled():
        print(f"\nloss {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f}")
        print("median step time [ms]", {k: round(1e3 * v, 2) for k, v in medians.items()})
        print(
            "peak resident MiB at step",
            {k: round(float(rss[k - 1]), 1) for k in (200, 700, 1400, 2000)},
        )
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert rss[1999] < rss[749] + 40  # a copy of everything saved so far would be more
    assert medians["1501-2000"] < 1.5 * medians["201-600"]  # other programs share the machine
