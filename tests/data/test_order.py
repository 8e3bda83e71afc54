"""A run that goes on notices when the samples it has read are no longer what they were."""

from pathlib import Path

import numpy as np
import pytest

from jaxtron.data.build import build_datasets
from jaxtron.data.config import DataConfig
from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.data.order import check_order, order_digest
from jaxtron.data.synthetic import SyntheticDataset
from jaxtron.errors import CheckpointError


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """20 documents of 10 to 29 tokens: 390 tokens, 48 whole rows of 8 an epoch."""
    with IndexedDatasetWriter(tmp_path / "set", np.dtype("uint16")) as writer:
        for i in range(20):
            writer.add_document([np.full(10 + i, i, np.uint16)])
        writer.finalize()
    return str(tmp_path / "set")


def digest(prefix: str, samples: int, consumed: int, **overrides: object) -> int | None:
    raw = {"paths": [prefix], "split": "100,0,0", "seq_length": 8, **overrides}
    config = DataConfig(**raw)  # type: ignore[arg-type]
    train = build_datasets(
        config, vocab_size=100, seed=1, train_samples=samples, valid_samples=0, test_samples=0
    ).train
    kind = config.dataloader_type
    return order_digest(train, consumed, dataloader_type=kind, seed=1)


def test_a_longer_run_within_the_same_epochs_reads_the_same_samples(prefix: str) -> None:
    assert digest(prefix, 20, 16) == digest(prefix, 40, 16) is not None


def test_another_number_of_epochs_changes_the_samples_read_so_far(prefix: str) -> None:
    assert digest(prefix, 40, 16) != digest(prefix, 140, 16)


def test_changed_documents_are_noticed_in_a_blend_too(prefix: str, tmp_path: Path) -> None:
    blend = {"paths": [0.5, prefix, 0.5, prefix]}
    before = digest(prefix, 20, 16, **blend)
    with IndexedDatasetWriter(tmp_path / "set", np.dtype("uint16")) as writer:
        for i in range(20):
            writer.add_document([np.full(30 - i, i, np.uint16)])
        writer.finalize()
    assert digest(prefix, 20, 16, **blend) != before


def test_the_cyclic_order_counts(prefix: str) -> None:
    cyclic = {"dataloader_type": "cyclic"}
    assert digest(prefix, 20, 16, **cyclic) != digest(prefix, 20, 16)


def test_sources_that_do_not_say_and_fresh_runs_have_no_digest(prefix: str) -> None:
    synthetic = SyntheticDataset("train", num_samples=8, seq_length=4, vocab_size=9, seed=0)
    assert order_digest(synthetic, 4, dataloader_type="single", seed=0) is None
    assert digest(prefix, 20, 0) is None


def test_a_changed_order_is_refused_with_the_ways_to_proceed() -> None:
    check_order({"data_order": 5}, 5, "run/3")
    check_order({}, 5, "run/3")
    with pytest.raises(CheckpointError, match=r"run/3 .*train\.steps .*finetune"):
        check_order({"data_order": 5}, 6, "run/3")
