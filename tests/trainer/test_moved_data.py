"""A run goes on with its data in another folder, if the contents are the same."""

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from jaxtron.errors import CheckpointError
from jaxtron.resume import check_continuation, run_meta
from tests.trainer.runs import make_config, make_trainer

CUT = {"exit_interval": 3, "num_microbatches": 1}


def moved_corpus(folder: Path, change: int | None = None) -> str:
    """A copy in another folder, the token at byte ``change`` changed."""
    other = folder / "elsewhere"
    other.mkdir(exist_ok=True)
    for ending in ("bin", "idx"):
        shutil.copy(folder / f"corpus.{ending}", other / f"text.{ending}")
    if change is not None:
        data = bytearray((other / "text.bin").read_bytes())
        data[change] ^= 1
        (other / "text.bin").write_bytes(data)
    return str(other / "text")


@pytest.mark.parametrize(
    "now, accepted",
    [
        ([0.3, "x", 0.7, [1, "y", 2, "z"]], True),
        ([0.3, "x", 0.7, [2, "y", 1, "z"]], False),
        ([0.3, "x", 0.7, "y"], False),
    ],
)
def test_nested_blends_may_move_but_keep_their_weights(tmp_path, now, accepted):
    config = make_config(tmp_path, data={"paths": [0.3, "a", 0.7, [1, "b", 2, "c"]]})
    meta = run_meta(config, 0, None, [1, 2, 3])
    moved = make_config(tmp_path, data={"paths": now})
    with nullcontext() if accepted else pytest.raises(CheckpointError, match=r"data\.paths"):
        check_continuation(moved, meta, "there", [1, 2, 3])


def test_moved_data_is_accepted_and_changed_data_refused(tmp_path, caplog) -> None:
    config = make_config(tmp_path, train=CUT)
    make_trainer(config).fit()
    changed = make_config(tmp_path, data={"paths": [moved_corpus(tmp_path, change=100)]})
    with pytest.raises(CheckpointError, match="would read other samples.*\n.*data.paths"):
        make_trainer(changed).fit()
    same = [moved_corpus(tmp_path)]
    weighted = make_config(tmp_path, data={"paths": [1.0, *same]})
    with pytest.raises(CheckpointError, match="data.paths"):
        make_trainer(weighted).fit()
    with caplog.at_level("INFO"):
        assert make_trainer(make_config(tmp_path, data={"paths": same})).fit().step == 6
    assert "the data has moved" in caplog.text
