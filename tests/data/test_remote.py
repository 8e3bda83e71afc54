"""URLs through fsspec: token files by ranges, JSON Lines, clear refusals."""

import gzip
import json

import fsspec
import numpy as np
import pytest

from jaxtron.data import remote
from jaxtron.data.documents import read_texts
from jaxtron.data.indexed import IndexedDataset, IndexedDatasetWriter
from jaxtron.errors import ConfigError, DataError


@pytest.fixture
def pair(tmp_path):
    """A set of 40 documents on disk, and the same behind memory://."""
    rng = np.random.default_rng(2)
    with IndexedDatasetWriter(tmp_path / "set", "uint16") as writer:
        for length in rng.integers(1, 60, 40):
            writer.add_document([rng.integers(0, 60000, length)])
    memory = fsspec.filesystem("memory")
    for ending in ("bin", "idx"):
        memory.pipe(f"/bucket/set.{ending}", (tmp_path / f"set.{ending}").read_bytes())
    yield tmp_path / "set", "memory://bucket/set"
    memory.rm("/bucket", recursive=True)


def test_every_piece_equals_the_local_file(pair, monkeypatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 64)  # sequences cross blocks
    local, other = (IndexedDataset(prefix) for prefix in pair)
    assert len(local) == len(other) == 40
    for i in range(40):
        assert np.array_equal(local[i], other[i]) and other[i].dtype == local[i].dtype
        length = len(local[i])
        assert np.array_equal(other.get(i, length // 2), local[i][length // 2 :])
        assert other.get(i, length, 0).size == 0
    assert local.fingerprint() == other.fingerprint()


def test_only_the_blocks_that_are_asked_for_are_read(pair, monkeypatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 64)
    other = IndexedDataset(pair[1])
    ranges = []
    read = remote.RemoteFile.read

    def counted(self, start=None, end=None):
        ranges.append((start, end))
        return read(self, start, end)

    monkeypatch.setattr(remote.RemoteFile, "read", counted)
    for _ in range(3):
        other.get(0, 0, 1)
    assert ranges == [(0, 64)]


def test_a_truncated_or_missing_remote_file_is_refused(pair) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/set.bin", memory.cat("/bucket/set.bin")[:-1])
    with pytest.raises(DataError, match="memory://bucket/set.bin: .* bytes, expected"):
        IndexedDataset(pair[1])
    with pytest.raises(DataError, match="memory://bucket/other.idx: no such file"):
        IndexedDataset("memory://bucket/other")


def test_json_lines_are_read_plain_and_compressed() -> None:
    memory = fsspec.filesystem("memory")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("a", "bc")).encode()
    memory.pipe("/lines/plain.jsonl", lines)
    memory.pipe("/lines/packed.jsonl.gz", gzip.compress(lines))
    for name in ("plain.jsonl", "packed.jsonl.gz"):
        assert list(read_texts([f"memory://lines/{name}"])) == ["a", "bc"]
    with pytest.raises(DataError, match="memory://lines/none does not exist"):
        list(read_texts(["memory://lines/none"]))
    memory.rm("/lines", recursive=True)


def test_an_unknown_kind_of_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="nosuch://a/b.idx cannot be opened"):
        IndexedDataset("nosuch://a/b")


def test_writing_to_a_url_is_refused() -> None:
    with pytest.raises(DataError, match="not to a URL"):
        IndexedDatasetWriter("memory://bucket/new", "uint16")
