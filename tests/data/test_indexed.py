"""Megatron's .bin/.idx format, against bytes laid out by hand from its description."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from jaxtron.data.indexed import (
    IndexedDataset,
    IndexedDatasetWriter,
    optimal_dtype,
    sequence_pointers,
)
from jaxtron.errors import DataError

CODES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}


def index_bytes(lengths, pointers, documents, *, code=8, magic=b"MMIDIDX\0\0", version=1, modes=()):
    """An .idx file, field by field."""
    return b"".join(
        [
            magic,
            struct.pack("<Q", version),
            struct.pack("<B", code),
            struct.pack("<Q", len(lengths)),
            struct.pack("<Q", len(documents)),
            struct.pack(f"<{len(lengths)}i", *lengths),
            struct.pack(f"<{len(pointers)}q", *pointers),
            struct.pack(f"<{len(documents)}q", *documents),
            struct.pack(f"<{len(modes)}b", *modes),
        ]
    )


def put(prefix: Path, idx: bytes, tokens: bytes) -> Path:
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(tokens)
    return prefix


def write(prefix, documents, dtype="uint16"):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document([np.asarray(s, dtype=np.int64) for s in document])
    return prefix


def files(prefix):
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


THREE = [[[1, 2, 3]], [[4]], [[5, 65535], [7, 8, 9]]]
THREE_IDX = index_bytes([3, 1, 2, 3], [0, 6, 8, 12], [0, 1, 2, 4])
THREE_BIN = struct.pack("<9H", 1, 2, 3, 4, 5, 65535, 7, 8, 9)


def test_writer_gives_the_bytes_of_the_format(tmp_path):
    idx, tokens = files(write(tmp_path / "a", THREE))
    assert idx == THREE_IDX
    assert tokens == THREE_BIN
    assert len(idx) == 34 + 12 * 4 + 8 * 4


def test_reader_reads_bytes_laid_out_by_hand(tmp_path):
    dataset = IndexedDataset(put(tmp_path / "a", THREE_IDX, THREE_BIN))
    assert [s.tolist() for s in dataset] == [[1, 2, 3], [4], [5, 65535], [7, 8, 9]]
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (4, 3, 9)
    assert dataset.dtype == np.uint16
    assert dataset.sequence_lengths.tolist() == [3, 1, 2, 3]
    assert dataset.sequence_pointers.tolist() == [0, 6, 8, 12]
    assert dataset.document_indices.tolist() == [0, 1, 2, 4]
    assert dataset.sequence_modes is None
    assert [dataset.document_of(i) for i in range(4)] == [0, 1, 2, 2]


def test_part_of_a_sequence_and_its_limits(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", THREE))
    assert dataset.get(3, 1).tolist() == [8, 9]
    assert dataset.get(3, 0, 2).tolist() == [7, 8]
    assert dataset.get(3, 3).tolist() == []
    assert dataset[-1].tolist() == [7, 8, 9]
    for bad in ((4, 0, None), (3, 2, 2), (3, -1, 1), (3, 4, None), (-5, 0, None)):
        with pytest.raises(IndexError):
            dataset.get(*bad)
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 1


@pytest.mark.parametrize("code", CODES)
def test_every_dtype_code_is_read_and_written(tmp_path, code):
    values = np.array([1, 2, 100], dtype=CODES[code])
    itemsize = values.itemsize
    idx = index_bytes([2, 1], [0, 2 * itemsize], [0, 1, 2], code=code)
    dataset = IndexedDataset(put(tmp_path / "by_hand", idx, values.tobytes()))
    assert dataset.dtype == values.dtype
    assert [s.tolist() for s in dataset] == [[1, 2], [100]]
    with IndexedDatasetWriter(tmp_path / "written", CODES[code]) as writer:
        writer.add_document([values[:2]])
        writer.add_document([values[2:]])
    assert files(tmp_path / "written") == (idx, values.tobytes())


@pytest.mark.parametrize(
    "vocab_size, code, itemsize", [(65499, 8, 2), (65500, 4, 4), (65536, 4, 4), (151936, 4, 4)]
)
def test_dtype_for_a_vocabulary_holds_its_largest_id(tmp_path, vocab_size, code, itemsize):
    dtype = optimal_dtype(vocab_size)
    assert dtype.itemsize == itemsize
    write(tmp_path / "a", [[[0, vocab_size - 1]]], dtype)
    assert files(tmp_path / "a")[0][17] == code
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("value", [65536, 70000, 100000, -1])
def test_an_id_that_does_not_fit_is_refused_and_leaves_no_files(tmp_path, value):
    with pytest.raises(DataError, match=rf"document 1 holds id {value}, outside uint16"):
        write(tmp_path / "a", [[[1]], [[2], [value]]])
    assert list(tmp_path.iterdir()) == []


def test_floats_are_not_token_ids(tmp_path):
    with (
        pytest.raises(DataError, match="float64"),
        IndexedDatasetWriter(tmp_path / "a", "int32") as writer,
    ):
        writer.add_document([np.array([1.5])])
    with pytest.raises(DataError, match="bool"):
        IndexedDatasetWriter(tmp_path / "b", "bool")


def test_a_document_of_two_to_the_31_tokens_is_refused(tmp_path):
    half = np.broadcast_to(np.uint16(0), (2**30,))  # takes no memory
    writer = IndexedDatasetWriter(tmp_path / "a", "uint16")
    with pytest.raises(DataError, match="document 0 has 2147483648 tokens"):
        writer.add_document([half, half])
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_pointers_are_64_bit_even_from_32_bit_lengths():
    lengths = np.full(3, 2**30, dtype=np.int32)
    assert sequence_pointers(lengths, 4).tolist() == [0, 4294967296, 8589934592]
    assert sequence_pointers([], 4).tolist() == []


def test_nothing_is_there_before_finalize_and_rewriting_replaces_the_pair(tmp_path):
    write(tmp_path / "a", [[[1, 2]]])
    writer = IndexedDatasetWriter(tmp_path / "a", "uint16")
    writer.add_document([np.array([7])])
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1, 2]
    writer.finalize()
    writer.finalize()
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [7]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_an_error_while_writing_keeps_the_old_pair(tmp_path):
    write(tmp_path / "a", [[[1, 2]]])
    documents = [[np.array([7])], [np.array([8])], None]
    with (
        pytest.raises(TypeError, match="None"),
        IndexedDatasetWriter(tmp_path / "a", "uint16") as writer,
    ):
        list(map(writer.add_document, documents))
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_empty_documents_and_empty_sets(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", [[[]], [[5]], [], [[], [6, 7]]]))
    assert [s.tolist() for s in dataset] == [[], [5], [], [6, 7]]
    assert dataset.document_indices.tolist() == [0, 1, 2, 2, 4]
    write(tmp_path / "none", [])
    assert files(tmp_path / "none") == (index_bytes([], [], [0]), b"")
    assert len(IndexedDataset(tmp_path / "none")) == 0


def test_multimodal_sets_are_read_with_their_modes(tmp_path):
    idx = index_bytes([1, 2], [0, 2], [0, 2], modes=[0, 1])
    dataset = IndexedDataset(put(tmp_path / "a", idx, struct.pack("<3H", 1, 2, 3)))
    assert dataset.sequence_modes.tolist() == [0, 1]
    assert dataset[1].tolist() == [2, 3]
    with (
        pytest.raises(DataError, match="multimodal"),
        IndexedDatasetWriter(tmp_path / "b", "uint16") as writer,
    ):
        writer.add_index(tmp_path / "a")


def test_merging_equals_writing_all_documents_at_once(tmp_path):
    parts = [THREE[:2], [], [*THREE, [[]], [[11], [12], [13]]]]
    for number, part in enumerate(parts):
        write(tmp_path / f"part{number}", part)
    write(tmp_path / "whole", [document for part in parts for document in part])
    with IndexedDatasetWriter(tmp_path / "merged", "uint16") as writer:
        for number in range(len(parts)):
            writer.add_index(tmp_path / f"part{number}")
    assert files(tmp_path / "merged") == files(tmp_path / "whole")


def test_merging_different_dtypes_is_refused(tmp_path):
    write(tmp_path / "a", THREE, "int32")
    with (
        pytest.raises(DataError, match="int32.*uint16"),
        IndexedDatasetWriter(tmp_path / "m", "uint16") as writer,
    ):
        writer.add_index(tmp_path / "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


DAMAGE = {
    "idx cut by 1 byte": (THREE_IDX[:-1], THREE_BIN, "a.idx: 113 bytes, expected 114"),
    "idx cut by 8 bytes": (THREE_IDX[:-8], THREE_BIN, "a.idx: 106 bytes, expected 114"),
    "idx cut in half": (THREE_IDX[:57], THREE_BIN, "a.idx: 57 bytes, expected 114"),
    "idx cut in the header": (THREE_IDX[:20], THREE_BIN, "a.idx: 20 bytes"),
    "idx empty": (b"", THREE_BIN, "a.idx: 0 bytes"),
    "idx too long": (THREE_IDX + b"\0", THREE_BIN, "a.idx: 115 bytes, expected 114"),
    "bin cut": (THREE_IDX, THREE_BIN[:-1], "a.bin: 17 bytes, expected 18"),
    "bin empty": (THREE_IDX, b"", "a.bin: 0 bytes, expected 18"),
    "bin of another set": (THREE_IDX, THREE_BIN * 2, "a.bin: 36 bytes, expected 18"),
    "magic": (b"X" + THREE_IDX[1:], THREE_BIN, "not a Megatron index"),
    "version": (
        index_bytes([1], [0], [0, 1], version=2),
        b"ab",
        "index version 2; only version 1",
    ),
    "dtype code": (index_bytes([1], [0], [0, 1], code=99), b"ab", "dtype code 99"),
    "documents not from 0": (index_bytes([1], [0], [1, 1]), b"ab", "runs from 1 to 1, expected 0"),
    "documents not to N": (index_bytes([1], [0], [0, 2]), b"ab", "runs from 0 to 2"),
    "no documents": (index_bytes([1], [0], []), b"ab", "nothing"),
    "documents shuffled": (
        index_bytes([1, 1, 1], [0, 2, 4], [0, 2, 1, 3]),
        b"abcdef",
        "decreases at entry 2: 2 then 1",
    ),
    "negative length": (index_bytes([2, -1], [0, 4], [0, 2]), b"ab", "sequence 1 has negative"),
    "pointer": (index_bytes([1, 1], [0, 3], [0, 2]), b"abcd", "sequence 1 is said to start at"),
    "pointer overflowed": (index_bytes([1, 1], [0, -2], [0, 2]), b"abcd", "at byte -2"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_pair_is_refused_at_open(tmp_path, damage):
    idx, tokens, message = DAMAGE[damage]
    put(tmp_path / "a", idx, tokens)
    with pytest.raises(DataError, match=message) as error:
        IndexedDataset(tmp_path / "a")
    assert str(tmp_path / "a.") in str(error.value)


@pytest.mark.parametrize("missing", ["idx", "bin"])
def test_a_missing_half_is_named(tmp_path, missing):
    write(tmp_path / "a", THREE)
    (tmp_path / f"a.{missing}").unlink()
    with pytest.raises(DataError, match=rf"a\.{missing}: no such file"):
        IndexedDataset(tmp_path / "a")


def test_a_worker_process_gets_a_dataset_that_maps_the_files_itself(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", THREE))
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    assert pickle.loads(data)[3].tolist() == [7, 8, 9]
