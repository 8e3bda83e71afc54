"""A run goes on with its data in another folder, if the contents are the same."""

import shutil
from pathlib import Path

import pytest

from jaxtron.errors import CheckpointError
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
