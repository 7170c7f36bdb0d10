"""Reports of collapsed routers, and the sentence about them."""

from __future__ import annotations

import pytest

from moejob_api.router_health import collapse_text, health_measures, layers_text, reported_layers


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        pytest.param((7,), "layer 7", id="one"),
        pytest.param((7, 3), "layers 3 and 7", id="two, in their order"),
        pytest.param((3, 4), "layers 3, 4", id="neighbours"),
        pytest.param((3, 4, 5), "layers 3-5", id="a range"),
        pytest.param((0, 3, 4, 5, 12), "layers 0, 3-5 and 12", id="both"),
    ],
)
def test_layers_are_listed_as_ranges(layers: tuple[int, ...], text: str) -> None:
    assert layers_text(layers) == text
    assert f"of {text} collapsed" in collapse_text(layers)


@pytest.mark.parametrize("layers", [(), (0,), (3, 4, 12), tuple(range(100))])
def test_a_report_has_the_layers(layers: tuple[int, ...]) -> None:
    assert reported_layers({"loss": 1.0, **health_measures(layers)}) == layers


def test_before_it_is_known_a_report_says_nothing() -> None:
    assert health_measures(None) == {}
    assert reported_layers({"loss": 1.0}) is None


def test_a_model_of_many_layers_leaves_room_for_other_measures() -> None:
    measures = health_measures(tuple(range(1000)))
    assert len(measures) == 129
    assert measures["collapsedRouters"] == 1000


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("x", id="no number"),
        pytest.param("", id="nothing"),
        pytest.param("-1", id="a negative number"),
        pytest.param("9" * 500, id="a number that no model has"),
        pytest.param("\N{SUPERSCRIPT TWO}", id="a digit that is no number"),
        pytest.param("\N{ARABIC-INDIC DIGIT THREE}", id="another script"),
        pytest.param("1/2", id="a path"),
    ],
)
def test_what_is_no_layer_is_left_out(name: str) -> None:
    assert reported_layers({"collapsedRouters": 1.0, f"collapsedRouter/{name}": 1.0}) == ()
