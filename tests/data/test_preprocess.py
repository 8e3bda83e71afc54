"""Preprocessing: what ends up in the files, whatever the input looks like (cases O01, O02, O03).

The outputs are read back with ``read_raw``, which knows the file layout and nothing of jaxtron.
"""

import bz2
import gzip
import json
import lzma
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf

from jaxtron.data.__main__ import main
from jaxtron.data.documents import find_sources, read_blocks, total_bytes
from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.data.preprocess import preprocess
from jaxtron.errors import ConfigError, DataError, JaxtronError

EOD = 256
FIXED = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}


def read_raw(prefix: Path) -> tuple[list[list[int]], list[int], int]:
    """(sequences, document index, dtype code) of a pair of files."""
    idx, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    code = idx[17]
    count, documents = struct.unpack_from("<QQ", idx, 18)
    lengths = struct.unpack_from(f"<{count}i", idx, 34)
    index = struct.unpack_from(f"<{documents}q", idx, 34 + 12 * count)
    values = np.frombuffer(tokens, FIXED[code])
    assert values.size == sum(lengths)
    ends = np.cumsum(lengths)
    return [values[e - n : e].tolist() for e, n in zip(ends, lengths)], list(index), code


def write_lines(path: Path, *lines: object) -> Path:
    """Bytes as they are, anything else as JSON; a newline after each."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def texts(*values: str) -> list[dict[str, str]]:
    return [{"text": value} for value in values]


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write_vocabulary(path: Path, size: int) -> Path:
    """A tokenizer of words w0, w1, … with these ids and no end of document."""
    vocab = {f"w{i}": i for i in range(size)}
    tokenizer = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


# -- O01: empty documents and the end of document --------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_empty_documents_are_skipped_and_every_document_ends_with_eod(tmp_path, capsys, workers):
    source = write_lines(tmp_path / "in.jsonl", *texts("", "ab", "   ", "c"))
    arguments = ["preprocess", "--input", str(source), "--output-prefix", str(tmp_path / "out")]
    arguments += ["--tokenizer", "byte", "--append-eod", "--workers", str(workers)]
    assert main(arguments) == 0
    sequences, index, code = read_raw(tmp_path / "out_text_document")
    # White space is text and is kept.
    assert sequences == [[97, 98, EOD], [32, 32, 32, EOD], [99, EOD]]
    assert (index, code) == ([0, 1, 2, 3], 8)
    assert (tmp_path / "out_text_document.bin").stat().st_size == (3 + 4 + 2) * 2
    printed = capsys.readouterr().out
    assert "documents=3 sequences=3 tokens=9 dtype=uint16 skipped_empty=1" in printed


def test_without_append_eod_nothing_is_added(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *texts("ab", "c"))
    preprocess([source], tmp_path / "out", "byte")
    assert read_raw(tmp_path / "out_text_document")[0] == [[97, 98], [99]]


def test_corpus_without_text_is_an_error_and_leaves_no_file(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *texts("", ""))
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"key 'text' .*skipped_empty=2"):
        preprocess([source], tmp_path / "out" / "x", "byte", append_eod=True)
    assert files_in(tmp_path / "out") == set()


def test_append_eod_without_an_eod_is_refused_before_reading(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", b"this would be a DataError if it were read")
    vocabulary = write_vocabulary(tmp_path / "tokenizer.json", 3)
    with pytest.raises(ConfigError, match="--append-eod: .* no end-of-document"):
        preprocess([source], tmp_path / "out", str(vocabulary), append_eod=True)
    assert files_in(tmp_path) == {"in.jsonl", "tokenizer.json"}


def test_eod_token_can_be_named(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *texts("w1 w1"))
    vocabulary = write_vocabulary(tmp_path / "tokenizer.json", 3)
    preprocess([source], tmp_path / "out", str(vocabulary), append_eod=True, eod_token="w2")
    assert read_raw(tmp_path / "out_text_document")[0] == [[1, 1, 2]]


# -- O02: malformed input --------------------------------------------------------------------------

BAD_LINES = [
    (b'{"text": "cut o', "bad_json", r"bad JSON \(Unterminated string starting at character 10\)"),
    (b'{"text": "a"}{"text": "b"}', "bad_json", r"bad JSON \(Extra data at character 14\)"),
    ({"body": "a"}, "missing_key", r"key 'text' missing \(its keys: 'body'\)"),
    ({"text": 7}, "not_a_string", r"value of key 'text' is not a string but a number"),
    ({"text": None}, "not_a_string", r"value of key 'text' is not a string but null"),
    (["text"], "not_an_object", r"not a JSON object but an array"),
    (b'{"text": "\xff"}', "not_utf8", r"not UTF-8"),
    (b"[" * 100_000, "bad_json", r"bad JSON"),
]


@pytest.mark.parametrize("bad, reason, message", BAD_LINES)
def test_bad_line_is_named_by_file_line_and_reason(tmp_path, bad, reason, message):
    source = write_lines(tmp_path / "in.jsonl", {"text": "a"}, b"", bad, {"text": "c"})
    with pytest.raises(DataError, match=rf"in\.jsonl line 3: {message}"):
        preprocess([source], tmp_path / "out", "byte")
    assert files_in(tmp_path) == {"in.jsonl"}


@pytest.mark.parametrize("workers", [1, 3])
def test_skipping_bad_lines_equals_a_cleaned_file(tmp_path, workers):
    """In processes of their own, whose time is limited: a hang would be a failure."""
    good = texts("one", "two", "three")
    dirty = [good[0], *(bad for bad, _, _ in BAD_LINES[:4]), good[1]]
    dirty += [bad for bad, _, _ in BAD_LINES[4:]] + [good[2]]
    command = [sys.executable, "-m", "jaxtron.data", "preprocess", "--tokenizer", "byte"]
    command += ["--workers", str(workers), "--on-error", "skip"]
    printed = {}
    for name, lines in (("dirty", dirty), ("clean", good)):
        source = write_lines(tmp_path / f"{name}.jsonl", *lines)
        arguments = ["--input", str(source), "--output-prefix", str(tmp_path / name)]
        printed[name] = subprocess.run(
            [*command, *arguments], check=True, capture_output=True, text=True, timeout=20
        )
    counts = "bad_json=3 missing_key=1 not_a_string=2 not_an_object=1 not_utf8=1"
    assert f"bad_records=8 {counts}" in printed["dirty"].stdout
    assert "bad_records=0" in printed["clean"].stdout
    assert "preprocess:" not in printed["dirty"].stderr  # no bar drawn between them
    skipped = re.findall(r"skipped: .*dirty\.jsonl line (\d+): (.*)", printed["dirty"].stderr)
    assert [int(line) for line, _ in skipped] == [2, 3, 4, 5, 7, 8, 9, 10]
    for (_, found), (_, _, message) in zip(skipped, BAD_LINES, strict=True):
        assert re.match(message, found)
    for ending in ("bin", "idx"):
        dirty_bytes = (tmp_path / f"dirty_text_document.{ending}").read_bytes()
        assert dirty_bytes == (tmp_path / f"clean_text_document.{ending}").read_bytes()


def test_first_bad_line_in_file_order_is_reported_with_many_workers(tmp_path):
    lines = [*texts(*["x" * 1000] * 3000), b"bad one", *texts(*["x" * 1000] * 3000), b"bad two"]
    source = write_lines(tmp_path / "in.jsonl", *lines)
    with pytest.raises(DataError, match="line 3001: bad JSON"):
        preprocess([source], tmp_path / "out", "byte", workers=2)


def test_bom_crlf_blank_lines_and_a_missing_last_newline_are_accepted(tmp_path):
    source = tmp_path / "in.jsonl"
    text = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n\xef\xbb\xbf{"text": "b"}\r\n\n{"text": "c"}'
    source.write_bytes(text)
    bom_alone = tmp_path / "bom.jsonl"
    bom_alone.write_bytes(b"\xef\xbb\xbf")
    preprocess([bom_alone, source], tmp_path / "out", "byte")
    assert read_raw(tmp_path / "out_text_document")[0] == [[97], [98], [99]]


def test_unicode_line_separators_do_not_split_a_record(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes('{"text": "a\u2028b"}\n'.encode())
    preprocess([source], tmp_path / "out", "byte")
    assert read_raw(tmp_path / "out_text_document")[0] == [[97, 0xE2, 0x80, 0xA8, 98]]


def test_surrogates_are_joined_or_replaced(tmp_path):
    lines = [rb'{"text": "\ud83d\ude00"}', rb'{"text": "a\ud800"}']
    source = write_lines(tmp_path / "in.jsonl", *lines)
    preprocess([source], tmp_path / "out", "byte")
    sequences, _, _ = read_raw(tmp_path / "out_text_document")
    assert sequences == [[0xF0, 0x9F, 0x98, 0x80], [97, 0xEF, 0xBF, 0xBD]]


def test_input_of_bad_lines_alone_is_an_error_even_when_skipping(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", b"bad", b"worse")
    with pytest.raises(DataError, match="bad_records=2"):
        preprocess([source], tmp_path / "out", "byte", on_error="skip", append_eod=True)
    assert files_in(tmp_path) == {"in.jsonl"}


def test_dead_worker_is_an_error_and_not_a_hang(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *texts(*["word " * 4000] * 4000))

    def kill_one_worker() -> None:
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            if children := multiprocessing.active_children():
                children[0].kill()
                return
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one_worker)
    killer.start()
    started = time.monotonic()
    with pytest.raises(DataError, match="a worker process died"):
        preprocess([source], tmp_path / "out", "byte", workers=2)
    killer.join()
    assert time.monotonic() - started < 20
    assert files_in(tmp_path) == {"in.jsonl"}


# -- O03: width of the ids -------------------------------------------------------------------------


@pytest.mark.parametrize("size, code", [(65_499, 8), (65_500, 4), (65_536, 4), (151_936, 4)])
def test_stored_width_follows_the_vocabulary(tmp_path, size, code):
    vocabulary = write_vocabulary(tmp_path / "tokenizer.json", size)
    source = write_lines(tmp_path / "in.jsonl", *texts(f"w1 w{size - 1}"))
    preprocess([source], tmp_path / "out", str(vocabulary))
    sequences, _, stored = read_raw(tmp_path / "out_text_document")
    assert (sequences, stored) == ([[1, size - 1]], code)


def test_writing_many_documents_at_once_equals_one_by_one(tmp_path):
    documents = [[[1, 2], [3]], [[4]], [[5, 6, 7], [], [8]]]
    with IndexedDatasetWriter(tmp_path / "single", "uint16") as writer:
        for document in documents:
            writer.add_document([np.array(sequence, np.int32) for sequence in document])
    lengths, counts = np.array([2, 1, 1, 3, 0, 1]), np.array([2, 1, 3])
    with IndexedDatasetWriter(tmp_path / "bulk", "uint16") as writer:
        writer.add_documents(np.arange(1, 4, dtype=np.int32), lengths[:2], counts[:1])
        writer.add_documents(np.arange(4, 9, dtype=np.int32), lengths[2:], counts[1:])
    for ending in ("bin", "idx"):
        single = (tmp_path / f"single.{ending}").read_bytes()
        assert single == (tmp_path / f"bulk.{ending}").read_bytes()


@pytest.mark.parametrize("bad", [65_536, 70_000, 100_000, -1])
def test_writing_many_documents_at_once_refuses_ids_that_do_not_fit(tmp_path, bad):
    with (
        pytest.raises(DataError, match=f"document 1 holds id {bad}, outside uint16"),
        IndexedDatasetWriter(tmp_path / "out", "uint16") as writer,
    ):
        writer.add_documents(np.array([1, 2, bad, 4]), np.array([2, 2]), np.array([1, 1]))
    assert files_in(tmp_path) == set()


# -- inputs and outputs ----------------------------------------------------------------------------


def test_output_does_not_depend_on_the_number_of_workers(tmp_path):
    # Documents of 0 to 2998 bytes, 4.5 MB in all: several blocks for each of three workers.
    alphabet = "abcdefghijklmnopqrstuvwxyz" * 120
    values = [alphabet[i % 26 : i % 26 + i * 7919 % 2999] for i in range(3000)]
    source = write_lines(tmp_path / "in.jsonl", *texts(*values))
    for workers in (1, 2, 3):
        preprocess([source], tmp_path / f"out{workers}", "byte", workers=workers)
    sequences, _, _ = read_raw(tmp_path / "out1_text_document")
    assert sequences == [list(value.encode()) for value in values if value]
    for ending in ("bin", "idx"):
        one, two, three = (
            (tmp_path / f"out{w}_text_document.{ending}").read_bytes() for w in (1, 2, 3)
        )
        assert one == two == three


def test_every_key_becomes_a_dataset_of_its_own(tmp_path):
    records = [{"title": "T", "body": "ab", "id": 1}, {"title": "", "body": "c", "id": 2}]
    source = write_lines(tmp_path / "in.jsonl", *records)
    summary = preprocess([source], tmp_path / "out", "byte", json_keys=("title", "body"))
    assert read_raw(tmp_path / "out_title_document")[0] == [[84]]
    assert read_raw(tmp_path / "out_body_document")[0] == [[97, 98], [99]]
    assert summary.datasets["title"].skipped_empty == 1
    assert summary.datasets["body"].skipped_empty == 0


def test_a_key_without_any_text_leaves_no_file_of_any_key(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", {"title": "", "body": "ab"})
    with pytest.raises(DataError, match="key 'title'"):
        preprocess([source], tmp_path / "out", "byte", json_keys=("title", "body"))
    assert files_in(tmp_path) == {"in.jsonl"}


def test_sentences_become_sequences_and_only_the_last_gets_eod(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *texts("Ab. Cd!", "\n", "E"))
    preprocess([source], tmp_path / "out", "byte", split_sentences=True, append_eod=True)
    sequences, index, _ = read_raw(tmp_path / "out_text_sentence")
    assert sequences == [[65, 98, 46], [67, 100, 33, EOD], [69, EOD]]
    assert index == [0, 2, 3]


def test_compressed_files_read_like_plain_ones(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    parts = [json.dumps({"text": word}).encode() + b"\n" for word in ("a", "b", "c")]
    # Several members or frames in one file are what parallel compressors write.
    (tmp_path / "x.jsonl.gz").write_bytes(b"".join(gzip.compress(part) for part in parts))
    frames = [zstandard.compress(part) for part in parts]
    (tmp_path / "x.jsonl.zst").write_bytes(b"".join(frames))
    note = b"\x50\x2a\x4d\x18" + (2).to_bytes(4, "little") + b"ab"  # a frame without content
    (tmp_path / "x.pzstd").write_bytes(b"".join(note + frame for frame in frames))
    for name in ("x.jsonl.gz", "x.jsonl.zst", "x.pzstd"):
        preprocess([tmp_path / name], tmp_path / name, "byte")
        assert read_raw(tmp_path / f"{name}_text_document")[0] == [[97], [98], [99]]


def test_damaged_compressed_files_are_an_error_that_names_them(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    text = b"".join(json.dumps({"text": str(i)}).encode() + b"\n" for i in range(2000))
    for name, packed in (("x.gz", gzip.compress(text)), ("x.zst", zstandard.compress(text))):
        for damaged in (packed[: len(packed) // 2], packed[:-1]):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(DataError, match=rf"{name} cannot be read"):
                preprocess([tmp_path / name], tmp_path / "out", "byte")
    assert files_in(tmp_path) == {"x.gz", "x.zst"}


@pytest.mark.parametrize(
    "start, form",
    [
        (bz2.compress(b"{}"), "bzip2-compressed"),
        (lzma.compress(b"{}"), "xz-compressed"),
        (b"PAR1\x15\x04", "a Parquet file"),
        ("\ufeff{}".encode("utf-16-le"), "UTF-16 text"),
    ],
)
def test_files_of_another_form_are_refused_even_where_bad_lines_are_skipped(tmp_path, start, form):
    good = write_lines(tmp_path / "good.jsonl", *texts("a"))
    (tmp_path / "x").write_bytes(start)
    with pytest.raises(DataError, match=rf"x is {form}: give UTF-8 text"):
        preprocess([good, tmp_path / "x"], tmp_path / "out", "byte", on_error="skip")
    assert files_in(tmp_path) == {"good.jsonl", "x"}


def test_zstandard_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "x.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00")
    monkeypatch.setitem(sys.modules, "zstandard", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"x\.zst .* pip install zstandard"):
        preprocess([tmp_path / "x.zst"], tmp_path / "out", "byte")


def test_folder_gives_one_document_per_file_in_path_order(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "c.txt").write_bytes(b"3")
    (folder / "b" / "x.txt").write_bytes(b"2\r\n")
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf1")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "ignored.md").write_bytes(b"x")
    summary = preprocess([folder], tmp_path / "out", "byte")
    assert read_raw(tmp_path / "out_text_document")[0] == [[49], [50, 13, 10], [51]]
    assert summary.datasets["text"].skipped_empty == 1
    preprocess([folder], tmp_path / "out2", "byte", suffixes=(".md",))
    assert read_raw(tmp_path / "out2_text_document")[0] == [[120]]


def test_progress_reaches_the_size_of_all_inputs(tmp_path):
    plain = write_lines(tmp_path / "a.jsonl", *texts(*["x" * 1000] * 3000))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    sources = find_sources([plain, tmp_path / "b.jsonl.gz", plain])
    blocks = list(read_blocks(sources))
    positions = [block.position for block in blocks]
    sizes = [plain.stat().st_size, (tmp_path / "b.jsonl.gz").stat().st_size]
    assert positions == sorted(positions)
    assert positions[-1] == total_bytes(sources) == 2 * sizes[0] + sizes[1]
    assert max(len(block.records) for block in blocks) <= 1000


def test_inputs_are_taken_in_the_order_given(tmp_path):
    first = write_lines(tmp_path / "z.jsonl", *texts("1"))
    second = write_lines(tmp_path / "a.jsonl", *texts("2"))
    preprocess([first, second], tmp_path / "out", "byte")
    assert read_raw(tmp_path / "out_text_document")[0] == [[49], [50]]


def test_existing_output_is_kept_unless_overwriting_is_asked_for(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *texts("old"))
    preprocess([source], tmp_path / "out", "byte")
    write_lines(source, *texts("new"))
    with pytest.raises(ConfigError, match=r"out_text_document\.bin exists already: .*--overwrite"):
        preprocess([source], tmp_path / "out", "byte")
    write_lines(source, b"bad")
    with pytest.raises(DataError, match="line 1"):
        preprocess([source], tmp_path / "out", "byte", overwrite=True)
    assert read_raw(tmp_path / "out_text_document")[0] == [list(b"old")]
    write_lines(source, *texts("new"))
    preprocess([source], tmp_path / "out", "byte", overwrite=True)
    assert read_raw(tmp_path / "out_text_document")[0] == [list(b"new")]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"workers": 0}, "--workers 0"),
        ({"json_keys": ()}, "--json-keys"),
        ({"json_keys": ("a", "a")}, "--json-keys"),
        ({"json_keys": ("a/b",)}, "--json-keys 'a/b'"),
        ({"json_keys": ("a", "b"), "inputs": ["texts"]}, "folder of text files has one text"),
        ({"inputs": []}, "no input"),
        ({"inputs": ["gone.jsonl"]}, r"input gone\.jsonl does not exist"),
        ({"inputs": ["texts"], "suffixes": (".rst",)}, r"folder texts has no file ending in \.rst"),
        ({"tokenizer": "gone"}, "no tokenizer at 'gone'"),
        ({"on_error": "ignore"}, "--on-error 'ignore'"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    write_lines(tmp_path / "in.jsonl", *texts("a"))
    arguments = {"inputs": ["in.jsonl"], "output_prefix": "out", "tokenizer": "byte", **options}
    with pytest.raises(JaxtronError, match=message):
        preprocess(**arguments)
    assert files_in(tmp_path) == {"texts", "in.jsonl"}


def test_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", *texts("a"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxtron.data.preprocess.IndexedDatasetWriter.finalize", full)
    with pytest.raises(DataError, match="writing .*out.* failed: .*No space left"):
        preprocess([source], tmp_path / "out", "byte")
    assert files_in(tmp_path) == {"in.jsonl"}


def test_command_line_prints_errors_without_a_traceback(tmp_path):
    write_lines(tmp_path / "in.jsonl", b"oops")
    command = [sys.executable, "-m", "jaxtron.data", "preprocess", "--input", "in.jsonl"]
    command += ["--output-prefix", "out", "--tokenizer", "byte"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: in.jsonl line 1: bad JSON")
    assert "Traceback" not in done.stderr
    assert files_in(tmp_path) == {"in.jsonl"}


@pytest.mark.parametrize("command", ["preprocess", "merge", "inspect", "train-tokenizer"])
def test_every_command_has_help_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"example: jaxtron data {command}" in capsys.readouterr().out


MEMORY_SCRIPT = """
import resource, sys
from jaxtron.data.preprocess import preprocess
preprocess([sys.argv[1]], sys.argv[2], sys.argv[3], append_eod=True, eod_token=sys.argv[4])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path):
    """Case O23: peak memory from 10k to 200k tiny documents, below 1.3 times."""
    vocabulary = write_vocabulary(tmp_path / "tokenizer.json", 100)
    peaks = []
    for documents in (10_000, 200_000):
        source = tmp_path / f"{documents}.jsonl"
        source.write_bytes(b'{"text": "w1 w2 w3"}\n' * documents)
        arguments = [str(source), str(tmp_path / f"o{documents}"), str(vocabulary), "w9"]
        done = subprocess.run(
            [sys.executable, "-c", MEMORY_SCRIPT, *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.3 * peaks[0], peaks
    sequences, index, _ = read_raw(tmp_path / "o10000_text_document")
    assert (sequences[-1], index[-1]) == ([1, 2, 3, 9], 10_000)


def test_trained_tokenizer_and_preprocess_work_together_on_the_command_line(tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", *texts("ab ab ab", "ab"))
    folder, prefix = str(tmp_path / "bpe"), str(tmp_path / "out")
    assert main(["train-tokenizer", "--input", str(source), "--vocab-size", "258"]
                + ["--output", folder]) == 0  # fmt: skip
    assert "vocab_size=258 eod=0" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="tokenizer.json exists already: .*--overwrite"):
        main(["train-tokenizer", "--input", str(source), "--vocab-size", "300", "--output", folder])
    arguments = ["--input", str(source), "--tokenizer", folder, "--output-prefix", prefix]
    assert main(["preprocess", *arguments, "--append-eod", "--workers", "1"]) == 0
    # Byte ids follow the order of their printable stand-ins; only the merge and eod are asserted.
    assert read_raw(Path(f"{prefix}_text_document"))[0][1] == [257, 0]
