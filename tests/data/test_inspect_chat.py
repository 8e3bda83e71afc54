"""What inspection says of conversations, counted by hand: one byte is one token."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtron.data.__main__ import main
from jaxtron.data.chat import chat_template
from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.data.inspect_chat import inspect_chats, marked
from jaxtron.data.tokenizers import load_tokenizer
from jaxtron.errors import JaxtronError

BYTE = load_tokenizer("byte")
SHORT = '{header: "{role}:", end: ".", after: " "}'
TURNS = [("user", "hi"), ("assistant", "yo"), ("user", "x"), ("assistant", "ok")]


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def three(tmp_path: Path) -> str:
    """Conversations of 45 and 23 tokens, 6 and 3 of them trained; between them a text of 5."""
    return write(tmp_path / "chats.jsonl", chat(*TURNS), {"text": "abcd"}, chat(*TURNS[:2]))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["inspect", *arguments]) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def short(*inputs: str, **options: Any) -> Any:
    template = chat_template({"header": "{role}:", "end": ".", "after": " "})
    return inspect_chats(inputs, template, BYTE, **options)


def test_the_report_of_three_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = three(tmp_path)
    options = ["--tokenizer", "byte", "--chat-template", SHORT, "--samples", "2"]
    assert printed(capsys, path, *options, "--seq-length", "64", "--packing", "best_fit") == [
        path,
        "conversations        2",
        "plain documents      1",
        "messages by role     'user' 3, 'assistant' 3 (trained)",
        "tokens               73",
        # The first byte of the text is only context: 6 + 4 + 3 of 73.
        "trained tokens       13 (17.8%)",
        "tokens per document  min 5, median 23, mean 24.3, max 45",
        "longer than a row    0 (of 64 tokens; the longest takes 44)",
        # 44 + 4 and 22 places of 2 * 64
        "rows                 2 by best_fit, 54.7% filled",
        "samples              what is trained is between « and »",
        "documents by length [tokens]",
        "4-7 │██████████████████████████████████████████████████ 1",
        "8-15 │ 0",
        "16-31 │██████████████████████████████████████████████████ 1",
        "32-63 │██████████████████████████████████████████████████ 1",
        f"{path} line 1, 45 tokens, 6 trained",
        "'user:hi. assistant:«yo.» user:x. assistant:«ok.» '",
        f"{path} line 3, 23 tokens, 3 trained",
        "'user:hi. assistant:«yo.» '",
    ]


def test_all_roles_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c.jsonl", chat(*TURNS, ("user", "y"), ("tool ", "no")))
    line = "messages by role     'user' 3, 'assistant' 2 (trained), 'tool ' 1"
    assert line in printed(capsys, path, "--tokenizer", "byte")


def test_chatml_is_the_template_unless_another_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "c.jsonl", chat(*TURNS[:2]))
    chatml = "'<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n«yo<|im_end|>»\\n'"
    assert printed(capsys, path, "--tokenizer", "byte")[-1] == chatml
    llama3 = printed(capsys, path, "--tokenizer", "byte", "--chat-template", "llama3")[-1]
    assert llama3.endswith("<|end_header_id|>\\n\\n«yo<|eot_id|>»'")


def test_a_document_may_have_one_token_more_than_a_row(tmp_path: Path) -> None:
    path = three(tmp_path)
    fits = [short(path, seq_length=n, packing="none").fit for n in (44, 43, 22, 21)]
    assert [fit.overlong for fit in fits] == [0, 1, 1, 2]
    assert [fit.rows for fit in fits] == [3, 2, 2, 1]


@pytest.mark.parametrize(("packing", "rows"), [("none", 4), ("first_fit", 3), ("best_fit", 2)])
def test_rows_are_those_of_the_packing(packing: str, rows: int, tmp_path: Path) -> None:
    # Places 3, 3, 5, 5 of 8: in this order 3 + 3, 5, 5; the longest first 5 + 3, 5 + 3.
    path = write(tmp_path / "t.jsonl", *({"text": "x" * n} for n in (3, 3, 5, 5)))
    fit = short(path, seq_length=8, packing=packing).fit
    assert fit.facts()[1][1] == f"{rows} by {packing}, {100 * 16 / (rows * 8):.1f}% filled"


def test_documents_without_a_trained_token_fill_no_row(tmp_path: Path) -> None:
    silent = chat(("user", "x"), ("assistant", ""))  # "user:x" and "assistant:", 16 tokens
    path = write(tmp_path / "t.jsonl", silent, {"text": "ab"})
    template = chat_template({"header": "{role}:", "end": ""})
    report = inspect_chats([path], template, BYTE, seq_length=14, packing="none")
    assert (report.tokens, report.trained) == (19, 2)
    assert ("nothing to train", "1 (left out by a run)") in report.facts()
    assert report.fit is not None
    assert (report.fit.overlong, report.fit.rows) == (1, 1)  # too long is refused all the same
    wide = inspect_chats([path], template, BYTE, seq_length=15, packing="none").fit
    assert wide is not None
    assert (wide.overlong, wide.rows) == (0, 1)


def test_long_parts_are_cut_in_their_middle_and_many_at_the_end() -> None:
    tokens = np.frombuffer(b"a" * 80 + b"b" * 70 + b"c" * 20, np.uint8).astype(np.int32)
    trained = np.arange(170) >= 80
    text = "a" * 80 + "«" + "b" * 60 + " … " + "c" * 20 + "»"
    assert marked((tokens, trained), BYTE) == text
    turns = np.arange(20) % 2 == 1
    assert marked((tokens[:20], turns), BYTE) == "a«a»" * 6 + " …"
    assert marked((tokens[:0], trained[:0]), BYTE) == ""


def test_compressed_and_several_files_are_read_in_order(tmp_path: Path) -> None:
    second = tmp_path / "more.jsonl.gz"
    second.write_bytes(gzip.compress(json.dumps({"text": "z"}).encode()))
    report = short(three(tmp_path), str(second), samples=2)
    assert (report.conversations, report.texts, report.tokens) == (2, 2, 75)
    assert report.samples[-1].heading == f"{second} line 1, 2 tokens, 1 trained"


def test_a_file_without_records_is_reported_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "c.jsonl")
    lines = printed(
        capsys, path, "--tokenizer", "byte", "--seq-length", "8", "--packing", "best_fit"
    )
    assert "messages by role     none" in lines
    assert "trained tokens       0 (0.0%)" in lines
    assert "rows                 0 by best_fit, 0.0% filled" in lines


def test_a_dataset_is_still_named_by_its_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = three(tmp_path)
    with IndexedDatasetWriter(prefix, "int32") as writer:
        writer.add_document([np.array([5, 6], "int32")])
    assert "sequences            1" in printed(capsys, prefix)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"messages": [', "line 2: bad JSON"),
        ('{"prompt": "a"}', "line 2: has neither 'messages' nor a string under 'text'"),
        ('{"messages": [{"role": "user"}]}', "line 2: message 0 is not an object"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "line 2: no message has the role"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}, '
            '{"role": "asistant", "content": "a"}]}',
            "line 2: message 1 has the role 'asistant', of which nothing would be trained",
        ),
    ],
)
def test_a_malformed_line_ends_it_as_in_training(
    record: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "a"}\n' + record + "\n")
    with pytest.raises(JaxtronError, match=f"c.jsonl {message}"):
        main(["inspect", str(path), "--tokenizer", "byte"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("c.jsonl", "c.jsonl is read as JSON Lines .* give --tokenizer"),
        ("gone.jsonl --tokenizer byte", "gone.jsonl does not exist"),
        ("c.jsonl --tokenizer byte --vocab-size 9", "--vocab-size: for a dataset"),
        ("c.jsonl --tokenizer byte --html page", "--html: for a dataset"),
        ("c.jsonl --tokenizer byte --samples -1", "--samples -1"),
        ("c.jsonl --tokenizer byte --seq-length 0", "--seq-length 0: give 1 or more"),
        ("c.jsonl --tokenizer byte --packing best_fit", "--packing best_fit .* --seq-length"),
        ("c.jsonl --tokenizer byte --chat-template chatm", "--chat-template: .* chatml"),
        ("c.jsonl --tokenizer byte --chat-template {end:1}", "--chat-template .* give chatml"),
        ("c.jsonl --tokenizer byte --chat-template [", "--chat-template is not valid YAML"),
        ("data --chat-template chatml", "--chat-template: for JSON Lines"),
        ("data --seq-length 8 --packing none", "--seq-length, --packing: for JSON Lines"),
        ("data c.jsonl", "give one dataset"),
        ("data.bin", "data.bin.idx: no such file; a dataset is named by its prefix"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("c.jsonl"), {"text": "a"})
    with IndexedDatasetWriter("data", "int32") as writer:
        writer.add_document([np.array([5], "int32")])
    with pytest.raises(JaxtronError, match=message):
        main(["inspect", *arguments.split()])
