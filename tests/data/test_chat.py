"""Conversations: tokens, what is trained, and the rows a run reads, worked out by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtron.data.build import build_datasets
from jaxtron.data.chat import TEMPLATES, chat_template, encode
from jaxtron.data.config import DataConfig
from jaxtron.data.loader import batches
from jaxtron.data.source import RowDataset
from jaxtron.data.tokenizers import load_tokenizer
from jaxtron.errors import ConfigError, DataError

BYTE = load_tokenizer("byte")
SHORT = {"header": "{role}:", "end": ".", "after": " "}
TURNS = [("user", "hi"), ("assistant", "yo"), ("user", "x"), ("assistant", "ok")]


def write(path: Path, *conversations: Any) -> str:
    path.write_text("".join(json.dumps(c) + "\n" for c in conversations))
    return str(path)


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def build(which: str = "train", samples: int | None = 4, vocab_size: int = 257, **data: Any):
    defaults = {
        "source": "chat",
        "seq_length": 64,
        "tokenizer": "byte",
        "chat_template": SHORT,
        "split": "1",
        "reset_attention_mask": True,
        "reset_position_ids": True,
    }
    counts = {f"{name}_samples": 0 for name in ("train", "valid", "test")}
    datasets = build_datasets(
        DataConfig(**{**defaults, **data}),
        vocab_size=vocab_size,
        seed=1,
        **{**counts, f"{which}_samples": samples},
    )
    return getattr(datasets, which)


def test_the_assistants_words_and_the_end_of_its_turns_are_trained() -> None:
    tokens, trained = encode(TURNS, chat_template(SHORT), BYTE)
    text = "user:hi. assistant:yo. user:x. assistant:ok. "
    assert bytes(tokens.tolist()).decode() == text
    marks = "                   ^^^                   ^^^ "
    assert [mark == "^" for mark in marks] == trained.tolist()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nyo<|eot_id|>",
        ),
    ],
)
def test_named_templates_are_the_published_ones(name: str, text: str) -> None:
    tokens, trained = encode(TURNS[:2], TEMPLATES[name], BYTE)
    assert bytes(tokens.tolist()).decode() == text
    end = "<|im_end|>" if name == "chatml" else "<|eot_id|>"
    assert bytes(tokens[trained].tolist()).decode() == "yo" + end


def test_a_plain_text_is_trained_whole_and_ends_with_the_end_of_document() -> None:
    tokens, trained = encode("ab", TEMPLATES["chatml"], BYTE)
    assert tokens.tolist() == [97, 98, 256]
    assert trained.all()


def test_rows_hold_whole_conversations_that_start_at_position_zero(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", chat(*TURNS), {"text": "abcd"}, chat(*TURNS[:2]))
    rows = build(paths=[path], packing="best_fit", samples=None)
    assert len(rows) == 2  # 44 + 4 places of 64; 22 more do not fit
    row = rows[0]
    assert bytes(row["tokens"][:44].tolist()) == b"user:hi. assistant:yo. user:x. assistant:ok."
    assert row["position_ids"][:44].tolist() == list(range(44))
    # 44 + 22 is too much: the text is beside the long conversation
    assert row["tokens"][44:48].tolist() == [97, 98, 99, 100]
    assert row["labels"][44:48].tolist() == [98, 99, 100, 256]
    assert row["segment_ids"].tolist() == [0] * 44 + [1] * 4 + [2] * 16
    assert row["loss_mask"].sum() == 6 + 4
    # the prediction of the first trained byte, "y" at 19, is made at 18
    assert np.flatnonzero(row["loss_mask"][:44]).tolist() == [18, 19, 20, 40, 41, 42]


def test_every_epoch_holds_every_conversation_once_in_another_order(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *({"text": chr(97 + i) * (3 + i)} for i in range(12)))
    one_epoch = build(paths=[path], packing="first_fit", samples=1, seq_length=16)
    rows = build(paths=[path], packing="first_fit", samples=4 * len(one_epoch), seq_length=16)
    assert [rows.provenance(i) for i in range(len(one_epoch))] == [
        one_epoch.provenance(i) for i in range(len(one_epoch))
    ]
    seen: list[int] = []
    for i in range(len(rows)):
        parts = rows.provenance(i)
        seen += parts[: len(parts) // 2]
    epochs = [seen[e : e + 12] for e in range(0, 36, 12)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_other_words_of_the_same_length_are_other_data(tmp_path: Path) -> None:
    made = []
    for folder, word in (("a", "abc"), ("b", "abc"), ("c", "abd")):
        (tmp_path / folder).mkdir()
        path = write(tmp_path / folder / "t.jsonl", {"text": word}, {"text": "xyz"})
        rows = build(paths=[path], packing="first_fit", samples=1)
        made.append((rows.provenance(0), rows.fingerprints()))
    assert made[0] == made[1]
    assert made[0][0] != made[2][0] and made[0][1] != made[2][1]


def test_batches_are_read_like_those_of_any_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *({"text": "abc" * (1 + i % 5)} for i in range(40)))
    rows = build(paths=[path], packing="first_fit", samples=8, seq_length=32)
    assert isinstance(rows, RowDataset)
    batch = next(iter(batches(rows, global_batch_size=4, start_sample=0, rows=[0, 1, 2, 3])))
    assert {name: a.shape for name, a in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids", "segment_ids"), (4, 32)
    )


def test_without_packing_the_switches_decide_about_the_arrays(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"text": "ab"}, {"text": "cd"})
    rows = build(paths=[path], reset_attention_mask=False, reset_position_ids=False, samples=None)
    assert [sorted(rows[i]) for i in range(2)] == [["labels", "loss_mask", "tokens"]] * 2


def test_documents_are_shared_out_by_data_split(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *({"text": chr(97 + i)} for i in range(10)))
    first = {}
    for split in ("train", "valid", "test"):
        rows = build(split, None, paths=[path], split="8,1,1")
        first[split] = [int(rows[i]["tokens"][0]) for i in range(len(rows))]
    assert first == {"train": list(range(97, 105)), "valid": [105], "test": [106]}


@pytest.mark.parametrize(("overlong", "lengths"), [("truncate", [3, 8, 2]), ("drop", [3, 2])])
def test_too_long_documents_are_cut_or_left_out_as_asked(
    overlong: str, lengths: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "t.jsonl", {"text": "abc"}, {"text": "x" * 9}, {"text": "de"})
    rows = build(paths=[path], seq_length=8, overlong=overlong, samples=None)
    assert [int(rows[i]["loss_mask"].sum()) for i in range(len(rows))] == lengths
    assert "1 documents longer than data.seq_length" in caplog.text


REFUSED: dict[str, tuple[list[Any], dict[str, Any], list[str]]] = {
    "too long": ([{"text": "x" * 70}], {}, ["line 1", "71 tokens", "at least 70", "truncate"]),
    "no assistant": ([chat(("user", "a"))], {}, ["line 1", "assistant"]),
    "message without content": (
        [{"text": "a"}, {"messages": [{"role": "user"}]}],
        {},
        ["line 2", "message 0", "content"],
    ),
    "misspelt assistant": (
        [chat(("assistant", "a"), ("user", "b"), ("assistent", "c"))],
        {},
        ["line 1", "message 2", "'assistent'", "'assistant'"],
    ),
    "assistant in capitals": (
        [chat(("assistant", "a"), ("Assistant", "c"))],
        {},
        ["line 1", "message 1", "'Assistant'"],
    ),
    "empty role": ([chat(("", "a"), ("assistant", "b"))], {}, ["line 1", "message 0", "''"]),
    "role that is no string": (
        [{"messages": [{"role": 7, "content": "a"}]}],
        {},
        ["line 1", "message 0", '{"role": 7, "content": "a"}'],
    ),
    "no messages and no text": ([{"prompt": "a"}], {}, ["line 1", "messages", "text"]),
    "not an object": ([["a"]], {}, ["line 1", "not a JSON object"]),
    "packing without isolation": (
        [{"text": "a"}],
        {"packing": "first_fit", "reset_attention_mask": False},
        ["data.packing first_fit", "data.reset_attention_mask", "none"],
    ),
    "no tokenizer": ([{"text": "a"}], {"tokenizer": None}, ["data.tokenizer"]),
    "unknown template": ([{"text": "a"}], {"chat_template": "chatm"}, ["chatm", "chatml"]),
    "template without an end": ([{"text": "a"}], {"chat_template": {"header": "x"}}, ["end"]),
    "template without a role": (
        [{"text": "a"}],
        {"chat_template": {"header": "{rolle}:", "end": "."}},
        ["data.chat_template", "'{rolle}:'", "{role}"],
    ),
    "small vocabulary": ([{"text": "a"}], {"vocab_size": 256}, ["257", "model.vocab_size"]),
    "nothing to train on": ([{"text": ""}], {}, ["no document", "train"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_with_file_line_and_fix(case: str, tmp_path: Path) -> None:
    records, data, words = REFUSED[case]
    path = write(tmp_path / "t.jsonl", *records)
    with pytest.raises((ConfigError, DataError)) as caught:
        build(paths=[path], **data)
    for word in words:
        assert word in str(caught.value)


def test_keys_of_the_source_chat_are_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"data\.packing is read by the source 'chat' alone"):
        build(source="synthetic", packing="first_fit", chat_template="chatml", tokenizer=None)
