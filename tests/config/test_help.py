"""The list of keys is complete and says what each key means."""

from typing import Any

import pytest

from jaxtron.config.help import help_config
from jaxtron.config.schema import describe_type, keys, sections


def test_help_lists_every_key_with_meaning_values_and_default() -> None:
    text = help_config()
    flat = " ".join(text.split())
    for key, info in keys().items():
        assert f"  {key}   (" in text
        assert info.help
        assert " ".join(info.help.split()) in flat
    assert "train.seed (default 1234)" in flat
    assert "train.steps (required)" in flat
    assert "observe.dir (default null)" in flat
    assert max(map(len, text.splitlines())) <= 100


def test_help_of_one_section_shows_that_section_alone() -> None:
    text = help_config("train")
    assert "train.steps" in text
    assert "model.num_layers" not in text


def test_the_sections_are_those_of_the_design() -> None:
    expected = "model parallel data train optimizer precision loss checkpoint eval observe runtime"
    assert list(sections()) == expected.split()


@pytest.mark.parametrize(
    "type_, constraints, words",
    [
        (int, {"ge": 1}, "an integer ≥ 1"),
        (float, {"gt": 0, "le": 1}, "a number > 0 and ≤ 1"),
        (int | None, {"ge": 1}, "an integer ≥ 1, or null"),
        (list[str], {}, "a list of text"),
        (tuple[int, int] | None, {}, "[an integer, an integer], or null"),
        (list[str | float], {}, "a list of (text, or a number)"),
        (dict[str, int], {}, "a mapping {name: an integer}"),
        (dict[str, Any], {}, "a mapping"),
        (bool, {}, "true or false"),
    ],
)
def test_types_in_words(type_: object, constraints: dict[str, int], words: str) -> None:
    assert describe_type(type_, constraints) == words
