"""Merging equals building in one go, byte for byte (case O05)."""

from pathlib import Path

import numpy as np
import pytest

from jaxtron.data.__main__ import main
from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.data.merge import merge
from jaxtron.errors import ConfigError, DataError, JaxtronError

PARTS = [
    [[[1, 2, 3]], [[4], [5, 6]]],  # the second document has two sentences
    [],
    [[[7]], [[8, 9], [10], [11, 12]], [[13]]],
]


def build(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document([np.array(sequence, dtype) for sequence in document])
    return prefix


def content(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (1, 1), (0,)])
def test_merge_equals_building_in_one_go(tmp_path, capsys, order):
    prefixes = [str(build(tmp_path / f"part{i}", part)) for i, part in enumerate(PARTS)]
    chosen = [prefixes[i] for i in order]
    documents = [document for i in order for document in PARTS[i]]
    whole = build(tmp_path / "whole", documents)
    arguments = ["merge", "--input", *chosen, "--output-prefix", str(tmp_path / "merged")]
    assert main(arguments) == 0
    assert content(tmp_path / "merged") == content(whole)
    printed = capsys.readouterr().out
    assert f"documents={len(documents)} sequences={sum(map(len, documents))}" in printed


def test_document_index_and_pointers_of_a_merge_are_shifted(tmp_path):
    prefixes = [build(tmp_path / f"part{i}", part) for i, part in enumerate(PARTS)]
    merged = merge(prefixes, tmp_path / "merged")
    assert merged.document_indices.tolist() == [0, 1, 3, 4, 7, 8]
    assert merged.sequence_lengths.tolist() == [3, 1, 2, 1, 2, 1, 2, 1]
    assert merged.sequence_pointers.tolist() == [0, 6, 8, 12, 14, 18, 20, 24]
    assert [merged[i].tolist() for i in (0, 2, 6)] == [[1, 2, 3], [5, 6], [11, 12]]


def test_parts_of_different_width_are_refused_before_writing(tmp_path):
    narrow = build(tmp_path / "narrow", PARTS[0])
    wide = build(tmp_path / "wide", PARTS[2], "int32")
    with pytest.raises(DataError, match="wide stores int32 tokens and .*narrow uint16"):
        merge([narrow, wide], tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


def test_a_damaged_later_part_leaves_no_output(tmp_path):
    good, bad = build(tmp_path / "good", PARTS[0]), build(tmp_path / "bad", PARTS[2])
    Path(f"{bad}.bin").write_bytes(Path(f"{bad}.bin").read_bytes()[:-1])
    with pytest.raises(DataError, match=r"bad\.bin"):
        merge([good, bad], tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


def test_existing_output_is_kept_unless_overwriting_is_asked_for(tmp_path):
    part = build(tmp_path / "part", PARTS[0])
    old = build(tmp_path / "merged", PARTS[2])
    before = content(old)
    with pytest.raises(ConfigError, match="exists already"):
        merge([part], old)
    assert content(old) == before
    merge([part], old, overwrite=True)
    assert content(old) == content(part)


def test_output_cannot_be_one_of_the_parts(tmp_path):
    part = build(tmp_path / "part", PARTS[0])
    with pytest.raises(ConfigError, match="is also an input"):
        merge([part], tmp_path / "sub" / ".." / "part", overwrite=True)
    assert content(part) == content(build(tmp_path / "again", PARTS[0]))


@pytest.mark.parametrize("prefixes, message", [([], "no input"), (["gone"], "no such file")])
def test_missing_parts_are_named(tmp_path, monkeypatch, prefixes, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JaxtronError, match=message):
        merge(prefixes, "merged")
