"""Placement of layers on stages and chunks."""

import pytest

from jaxtron.errors import ConfigError
from jaxtron.parallel.pipeline.layout import balanced, layout_text, parse_layout, place_layers


@pytest.mark.parametrize(
    "text, counts",
    [
        # Megatron's own example without its multi-token prediction stage.
        ("Et*3|(tt|)*29|L", [3] + [2] * 29 + [0, 0]),
        ("Et*3|(tt|)*29L", [3] + [2] * 29 + [0]),
        ("Ettt | tt, t | tL", [3, 3, 1]),
        ("E|t||tL", [0, 1, 0, 1]),
        ("E(t|(tt)*2|)*2L", [1, 4, 1, 4, 0]),
        ("Et*12L", [12]),
    ],
)
def test_layout_strings_of_megatrons_form(text, counts):
    assert parse_layout(text) == counts


@pytest.mark.parametrize(
    "text, message",
    [
        ("Ett|mL", "multi-token prediction"),
        ("tt|ttL", "begin with its only E"),
        ("Ett|tt", "end with its only L"),
        ("tE|tL", "begin with its only E"),
        ("Et|Et|L", "only E"),
        ("", "begin with its only E"),
        ("Ett|xL", "unknown symbol 'x' at 'xL'"),
        ("E(tt|L", r"\( without \) at 'the end'"),
        ("Ett)|L", r"no \( before \)"),
        ("Et*|L", r"\* needs"),
        ("*3E|L", r"\* needs"),
        ("Et*999999|L", "too many"),
        ("E((t*9999)*9999)*9999|L", "too many"),
    ],
)
def test_malformed_layouts_are_refused_with_the_place(text, message):
    with pytest.raises(ConfigError, match=rf"parallel\.pipeline_layout.*{message}"):
        parse_layout(text)


def test_chunks_go_around_the_stages():
    placement = place_layers(8, 2, 2, None)
    assert placement.layers == ((range(2), range(4, 6)), (range(2, 4), range(6, 8)))
    assert placement.held_by(1) == (range(2, 4), range(6, 8))
    assert placement.slots == 4


def test_uneven_and_empty_stages_hold_what_the_layout_says():
    placement = place_layers(6, 2, 2, "Et|ttt||ttL")
    assert placement.counts == ((1, 0), (3, 2))
    assert placement.held_by(0) == (range(1),)
    assert placement.held_by(1) == (range(1, 6),)  # neighbours although in two chunks
    assert placement.slots == 5


@pytest.mark.parametrize("layers, p, v", [(10, 4, 1), (80, 16, 2), (4, 8, 1), (126, 8, 1)])
def test_layers_that_do_not_fit_are_refused_and_the_offered_layout_fits(layers, p, v):
    with pytest.raises(ConfigError, match=f"model.num_layers {layers} is not a multiple") as caught:
        place_layers(layers, p, v, None)
    text = str(caught.value)
    if layers > p * v:
        offered = text.partition("pipeline_layout='")[2].partition("'")[0]
        counts = parse_layout(offered)
        assert sum(counts) == layers and len(counts) == p * v
        assert max(counts) - min(counts) == 1
    else:
        assert "pipeline_layout" not in text


def test_a_layout_for_other_stages_or_layers_is_refused():
    with pytest.raises(ConfigError, match=r"has 2 stages.*pipeline 4 × .*virtual_pipeline 1 = 4"):
        place_layers(4, 4, 1, "Ett|ttL")
    with pytest.raises(ConfigError, match=r"places 3 layers.*num_layers is 4: set .*to null"):
        place_layers(4, 2, 1, "Et|ttL")
    with pytest.raises(ConfigError, match=r"has 2 stages.*set parallel\.pipeline_layout to null"):
        place_layers(4, 1, 1, "Ett|ttL")


def test_every_layer_has_one_place_whatever_the_sizes():
    for layers in range(1, 40):
        for p, v in [(1, 1), (2, 1), (3, 2), (4, 3)]:
            counts = balanced(layers, p * v)
            layout = layout_text(counts) if p * v > 1 else None
            placement = place_layers(layers, p, v, layout)
            placed = [n for chunks in placement.layers for chunk in chunks for n in chunk]
            assert sorted(placed) == list(range(layers))
            assert [placement.counts[k % p][k // p] for k in range(p * v)] == counts
