"""Preprocessing: what ends up in the files, whatever the records are (cases O01, O02, O03).

The outputs are read back with ``read_raw``, which knows the file layout and nothing of jaxtron.
"""

import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxtron.data.__main__ import main
from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.data.preprocess import preprocess
from jaxtron.errors import ConfigError, DataError
from tests.data.token_files import files_in, read_raw, texts, write_lines, write_vocabulary

EOD = 256

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


# -- datasets and workers --------------------------------------------------------------------------


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
