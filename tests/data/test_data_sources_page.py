"""The sources that ``docs/data_sources.md`` shows, taken from the page and read."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxtron.config.run import EvalConfig
from jaxtron.data.build import build_datasets
from jaxtron.data.config import DataConfig
from jaxtron.data.loader import batches

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data_sources.md").read_text()
SEQ = 16


@pytest.fixture(name="package")
def _package(tmp_path, monkeypatch):
    """``my_data`` with the modules of the page, where Python finds it."""
    (tmp_path / "my_data").mkdir()
    for name, code in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_data"]:
        del sys.modules[name]


def build(module, folder, *, train_samples, valid_samples, seed=3):
    """Datasets of the page's YAML block for ``module``, read from ``folder``."""
    (block,) = re.findall(rf"```yaml\n(data:\n  source: my_data\.{module}:.*?)```", PAGE, re.DOTALL)
    keys = yaml.safe_load(block)["data"]
    return build_datasets(
        DataConfig(**{**keys, "source_options": {"folder": str(folder)}}),
        vocab_size=1000,
        seed=seed,
        train_samples=train_samples,
        valid_samples=valid_samples,
        test_samples=0,
    )


def first_tokens(dataset, start, count):
    return [int(dataset[k]["tokens"][0]) for k in range(start, start + count)]


def check_epochs(datasets, again, rows):
    """Two epochs of training rows, each complete and in an order of its own, the same each time."""
    epochs = [first_tokens(datasets.train, e * rows, rows) for e in range(2)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert first_tokens(again.train, 0, rows) == epochs[0]


def test_array_record(package, tmp_path):
    module = importlib.import_module("my_data.array_record")
    rows = [np.arange(SEQ + 1) + k for k in range(24)]
    module.write_rows(tmp_path / "train-0.array_record", rows[:10])
    module.write_rows(tmp_path / "train-1.array_record", rows[10:])
    module.write_rows(tmp_path / "valid.array_record", rows[:5])
    sizes = {"train_samples": 40, "valid_samples": None}
    datasets = build("array_record", tmp_path, **sizes)
    check_epochs(datasets, build("array_record", tmp_path, **sizes), rows=24)
    assert first_tokens(datasets.valid, 0, len(datasets.valid)) == [0, 1, 2, 3, 4]
    row = datasets.valid[2]
    assert row["labels"].tolist() == list(range(3, SEQ + 3))
    batch = next(batches(datasets.train, global_batch_size=4, start_sample=20, rows=[1, 3]))
    expected = [datasets.train[k]["tokens"] for k in (21, 23)]
    assert np.array_equal(batch["tokens"], expected)


def test_parquet(package, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = importlib.import_module("pyarrow.parquet")
    lengths = [SEQ + 1, 40, 5, 1, SEQ]
    documents = [np.arange(lengths[k % 5], dtype=np.int32) + k for k in range(24)]
    for name, part in (("train-0", documents[:10]), ("train-1", documents[10:])):
        pq.write_table(pa.table({"tokens": part}), tmp_path / f"{name}.parquet", row_group_size=4)
    pq.write_table(pa.table({"tokens": documents[:5]}), tmp_path / "valid.parquet")
    sizes = {"train_samples": 40, "valid_samples": None}
    datasets = build("parquet", tmp_path, **sizes)
    check_epochs(datasets, build("parquet", tmp_path, **sizes), rows=24)
    losses = [int(datasets.valid[k]["loss_mask"].sum()) for k in range(len(datasets.valid))]
    assert losses == [SEQ, SEQ, 4, 0, SEQ - 1]
    row = datasets.valid[2]
    assert row["labels"][row["loss_mask"] > 0].tolist() == [3, 4, 5, 6]


def test_the_page_names_a_key_that_exists():
    assert "eval.full_validation" in PAGE
    assert EvalConfig(full_validation=True).full_validation
