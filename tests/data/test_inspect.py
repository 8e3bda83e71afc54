"""What inspection reports, on datasets small enough to count by hand (case O03)."""

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import jaxtron.data.inspect as inspect_module
from jaxtron.data.__main__ import main
from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.data.inspect import inspect
from jaxtron.data.inspect_page import page
from jaxtron.data.inspect_parts import Bin
from jaxtron.data.tokenizers import load_tokenizer
from jaxtron.errors import DataError, JaxtronError


def build(prefix: Path, documents: list[list[list[int]]], dtype: str = "int32") -> str:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document([np.array(sequence, dtype) for sequence in document])
    return str(prefix)


def words(*texts: str) -> list[list[list[int]]]:
    return [[list(text.encode())] for text in texts]


def test_sizes_lengths_and_ids_are_counted(tmp_path):
    prefix = build(tmp_path / "d", [[[5], [6, 7]], [], [[8, 9, 10, 11]], [[12] * 9]])
    report = inspect(prefix)
    assert (report.documents, report.sequences, report.tokens) == (4, 4, 16)
    lengths = report.lengths
    assert (lengths.minimum, lengths.median, lengths.maximum) == (0, 3.5, 9)
    assert lengths.mean == 4.0
    assert (report.id_min, report.id_max, report.dtype) == (5, 12, "int32")
    assert report.vocab_size is None
    assert report.num_bad_ids == 0


def test_histogram_bins_are_powers_of_two(tmp_path):
    lengths = [1, 2, 3, 4, 7, 8, 16, 31, 0]
    prefix = build(tmp_path / "d", [[[1] * n] for n in lengths])
    assert inspect(prefix).lengths.histogram == [
        Bin(0, 0, 1),
        Bin(1, 1, 1),
        Bin(2, 3, 2),
        Bin(4, 7, 2),
        Bin(8, 15, 1),
        Bin(16, 31, 2),
    ]


def test_ids_out_of_range_are_located(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_module, "_CHUNK_TOKENS", 4)  # several pieces
    documents = [[[0, 99]], [], [[], [5, 100], [-1, 7, 8]], [[2**31 - 1]]]
    report = inspect(build(tmp_path / "d", documents), vocab_size=100)
    found = [(bad.document, bad.sequence, bad.position, bad.id) for bad in report.bad_ids]
    # Sequences: 0 [0, 99]; 1 empty; 2 [5, 100]; 3 [-1, 7, 8]; 4 [2147483647].
    assert found == [(2, 2, 1, 100), (2, 3, 0, -1), (3, 4, 0, 2147483647)]
    assert (report.num_bad_ids, report.id_min, report.id_max) == (3, -1, 2147483647)


def test_out_of_range_ids_fail_the_command_after_the_report(tmp_path, capsys):
    prefix = build(tmp_path / "d", [[[1, 100]], [[100] * 15]])
    with pytest.raises(DataError) as failure:
        main(["inspect", prefix, "--vocab-size", "100"])
    message = str(failure.value)
    assert "16 of 17 ids are out of range" in message
    assert f"dataset {prefix}, document 0 (sequence 0, position 1): id 100" in message
    assert "and 6 more" in message
    assert "ids out of range     16" in capsys.readouterr().out
    assert main(["inspect", prefix, "--vocab-size", "101"]) == 0


def test_tokenizer_decodes_samples_and_sets_the_range(tmp_path, capsys):
    prefix = build(tmp_path / "d", [*words("first", "second", "third"), [[256]]])
    assert main(["inspect", prefix, "--tokenizer", "byte", "--samples", "2"]) == 0
    printed = capsys.readouterr().out
    assert "'first'" in printed
    assert "'<|endoftext|>'" in printed
    assert "second" not in printed
    wrong = build(tmp_path / "w", [[[97, 257]]])
    with pytest.raises(DataError, match="document 0 .* id 257 is outside 0 to 256"):
        main(["inspect", wrong, "--tokenizer", "byte"])
    assert "ids [97, 257]" in capsys.readouterr().out


def test_long_samples_are_cut_and_marked(tmp_path):
    report = inspect(build(tmp_path / "d", words("x" * 5000)), tokenizer=load_tokenizer("byte"))
    (sample,) = report.samples
    assert sample.heading == "document 0, 5000 tokens"
    assert sample.text == "x" * 160 + " …"


def test_sentences_of_a_sample_are_joined(tmp_path):
    prefix = build(tmp_path / "d", [[list(b"ab"), list(b"cd")], [list(b"e")]])
    report = inspect(prefix, tokenizer=load_tokenizer("byte"), samples=1)
    assert [sample.text for sample in report.samples] == ["abcd"]


def test_dataset_without_documents_is_reported_too(tmp_path):
    prefix = build(tmp_path / "d", [])
    report = inspect(prefix, vocab_size=10)
    assert (report.documents, report.tokens, report.id_min) == (0, 0, None)
    assert report.lengths.histogram == report.samples == []
    assert "documents            0" in report.text()
    assert "<svg" in page(report)


class Outline(HTMLParser):
    """Checks that tags nest, and collects text and what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.bars: list[float] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        assert not {"src", "href"} & names.keys()
        if tag == "rect":
            self.bars.append(float(names["width"] or 0))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_is_self_contained_well_formed_and_escaped(tmp_path):
    documents = [*words("<script>&", "ab", "abc"), [[300]]]
    prefix = build(tmp_path / "d", documents)
    target = tmp_path / "page.html"
    with pytest.raises(DataError):
        main(["inspect", prefix, "--tokenizer", "byte", "--html", str(target)])
    outline = Outline()
    outline.feed(target.read_text(encoding="utf-8"))
    assert outline.open == []
    text = "".join(outline.text)
    assert "<script>&" in text
    assert "id 300 is outside 0 to 256" in text
    # Bins 1, 2-3, 4-7, 8-15 with 1, 2, 0 and 1 documents.
    assert outline.bars == [240.0, 480.0, 0.0, 240.0]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--samples", "-1"], "--samples -1"),
        (["--vocab-size", "0"], "--vocab-size 0"),
        (["--html", "no/such/folder.html"], "--html no/such/folder.html cannot be written"),
        (["--tokenizer", "gone"], "no tokenizer at 'gone'"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    prefix = build(tmp_path / "d", words("a"))
    with pytest.raises(JaxtronError, match=message):
        main(["inspect", prefix, *options])
