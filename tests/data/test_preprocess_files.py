"""Preprocessing: which files are read and written, and what the command line says."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtron.data.__main__ import main
from jaxtron.data.documents import find_sources, read_blocks, total_bytes
from jaxtron.data.preprocess import preprocess
from jaxtron.errors import ConfigError, DataError, JaxtronError
from tests.data.token_files import files_in, read_raw, texts, write_lines


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
