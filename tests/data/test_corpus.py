"""Collecting text from this machine: same sources, same file; fair order; limits kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtron.data.corpus import write_corpus
from jaxtron.errors import ConfigError, DataError


def read(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def make_folder(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_folder_gives_its_text_files_without_tests_packages_and_other_endings(tmp_path):
    folder = make_folder(
        tmp_path / "src",
        a_py="A",
        sub__b_txt="B",
        tests__c_py="C",
        sub__test__d_py="D",
        e_bin="E",
        empty_py="",
    )
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "f.py").write_text("F")
    (folder / "latin.py").write_bytes(b"# \xe9")
    corpus = write_corpus(tmp_path / "out" / "c.jsonl", [folder])
    assert sorted(read(corpus.path)) == ["A", "B"]
    assert (corpus.documents, corpus.text_bytes) == (2, 2)


def test_same_sources_give_the_same_file_in_every_process(tmp_path):
    folder = make_folder(tmp_path / "src", **{f"f{i}_txt": f"text {i}" for i in range(50)})
    code = "import sys; from jaxtron.data.corpus import write_corpus as w; w(*sys.argv[1:2], "
    code += "[sys.argv[2]], max_bytes=200)"
    for name in ("one", "two"):
        command = [sys.executable, "-c", code, str(tmp_path / name), str(folder)]
        subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert 20 <= len(read(tmp_path / "one")) <= 29  # texts of 6 and 7 bytes


def test_order_mixes_the_sources_so_that_a_contiguous_split_is_fair(tmp_path):
    first = make_folder(tmp_path / "a", **{f"f{i}_txt": f"a{i}" for i in range(200)})
    second = tmp_path / "b.jsonl"
    second.write_text("".join(json.dumps({"body": f"b{i}"}) + "\n" for i in range(200)))
    write_corpus(tmp_path / "out.jsonl", [first, second], json_key="body")
    texts = read(tmp_path / "out.jsonl")
    assert len(texts) == 400
    # 100 draws of 400 half and half: 50 expected, standard deviation below 5.
    assert 25 <= sum(text.startswith("a") for text in texts[-100:]) <= 75


def test_limit_is_shared_by_the_sources_and_no_document_is_cut(tmp_path):
    big = make_folder(tmp_path / "a", **{f"f{i}_txt": "x" * 10 for i in range(100)})
    small = make_folder(tmp_path / "b", **{f"f{i}_txt": "yé" for i in range(100)})
    corpus = write_corpus(tmp_path / "out.jsonl", [big, small], max_bytes=120)
    texts = read(corpus.path)
    assert texts.count("x" * 10) == 6
    assert texts.count("yé") == 20
    assert (len(texts), corpus.text_bytes) == (26, 120)


def test_default_source_is_the_standard_library(tmp_path):
    corpus = write_corpus(tmp_path / "out.jsonl", max_bytes=200_000)
    assert 150_000 < corpus.text_bytes <= 200_000
    for text in read(corpus.path):
        compile(text, "standard library", "exec")


def test_source_without_text_and_a_bad_limit_are_refused(tmp_path):
    folder = make_folder(tmp_path / "src", a_bin="x")
    with pytest.raises(DataError, match="src gives no document"):
        write_corpus(tmp_path / "out.jsonl", [folder])
    with pytest.raises(DataError, match="gone does not exist"):
        write_corpus(tmp_path / "out.jsonl", [tmp_path / "gone"])
    with pytest.raises(ConfigError, match="max_bytes 0"):
        write_corpus(tmp_path / "out.jsonl", max_bytes=0)
    assert not (tmp_path / "out.jsonl").exists()
