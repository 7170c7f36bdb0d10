"""The load of experts is drawn as it was counted."""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from typing import Any

import pytest

from cli.board.made_runs import experts_line
from moejob_cli.board.expert_load import expert_use, read_expert_load


def line(step: int, counts: list[int], **fields: Any) -> bytes:
    choices = base64.b64encode(zlib.compress(array("I", counts).tobytes())).decode()
    return json.dumps({"step": step, "layers": [0, 3], "experts": 2, "choices": choices} | fields).encode()


def test_an_expert_has_its_choices_over_the_mean_of_its_layer() -> None:
    load = read_expert_load([line(1, [10, 30, 40, 0])])
    assert (load["steps"], load["layers"], load["experts"]) == ([1], [0, 3], 2)
    assert [*base64.b64decode(load["loads"])] == [32, 96, 128, 0]
    assert load["use"] == [[pytest.approx(0.8774, abs=1e-4), 0.5]]


def test_steps_that_come_again_replace_the_steps_from_there_on() -> None:
    lines = [line(1, [1, 1, 1, 1]), line(2, [1, 1, 1, 1]), line(3, [1, 1, 1, 1]), line(2, [4, 0, 4, 0])]
    load = read_expert_load(lines)
    assert load["steps"] == [1, 2]
    assert load["use"][1] == [0.5, 0.5]


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(b"no json", id="no JSON"),
        pytest.param(line(2, [1, 2, 3]), id="too few"),
        pytest.param(line(2, [1] * 5), id="too many"),
        pytest.param(line(2, [1] * 4, choices="%%%"), id="no base64"),
        pytest.param(line(2, [1] * 4, choices=base64.b64encode(b"x").decode()), id="not compressed"),
        pytest.param(line(2, [1] * 4, experts=10**12), id="more than there are"),
        pytest.param(line(2, [0] * 4, choices=base64.b64encode(zlib.compress(bytes(10**7))).decode()), id="a bomb"),
    ],
)
def test_a_damaged_line_is_left_out(damaged: bytes) -> None:
    assert read_expert_load([line(1, [1, 1, 1, 1]), damaged])["steps"] == [1]


def test_many_steps_become_as_many_columns_as_a_screen_has() -> None:
    load = read_expert_load([experts_line(step).encode() for step in range(1, 1_001)])
    assert len(load["steps"]) == 240
    assert len(base64.b64decode(load["loads"])) == 240 * 6 * 32
    assert load["use"][-1][5] < 0.2
    assert load["use"][-1][0] > 0.9


def test_a_layer_without_tokens_uses_no_expert() -> None:
    assert expert_use([0, 0]) == 0.0
    assert read_expert_load([])["steps"] == []
