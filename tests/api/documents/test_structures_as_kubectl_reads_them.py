"""Quotes, blocks, anchors and merges, against kubectl 1.32: recorded, and asked again where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moejob_api.documents.tree import parse_documents

RECORDED: list[Any] = [
    pytest.param("a: 'it''s'\nb: \"\\u00e9\\x41\\n\"", {"a": "it's", "b": "éA\n"}, id="quotes"),
    pytest.param("a: |\n  x\n   y\n\nb: >-\n  x\n  y\n\n  z", {"a": "x\n y\n", "b": "x y\nz"}, id="blocks"),
    pytest.param("a: x\n  y\nb: 'x\n\n  y'", {"a": "x y", "b": "x\ny"}, id="text over several lines"),
    pytest.param("a:\n- 1\n- - 2\n  - b: 3\n    c: 4", {"a": [1, [2, {"b": 3, "c": 4}]]}, id="lists"),
    pytest.param("a: {\"b\":1, c: [x, 'y',], d: }", {"a": {"b": 1, "c": ["x", "y"], "d": None}}, id="brackets"),
    pytest.param("a: {b:1}", {"a": {"b:1": None}}, id="a colon without a space"),
    pytest.param("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}", {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}, id="merge"),
    pytest.param("a: {<<: [{b: 1}, {b: 2, c: 3}]}", {"a": {"b": 1, "c": 3}}, id="the first merged wins"),
    pytest.param("'<<': {a: 1}", {"<<": {"a": 1}}, id="a quoted merge is a name"),
    pytest.param("a: &x 1\nb: *x\nc: &x 2\nd: *x", {"a": 1, "b": 1, "c": 2, "d": 2}, id="anchors again"),
    pytest.param("1: a\ntrue: b", {"1": "a", "true": "b"}, id="names that are no text"),
    pytest.param("a: !!str 5\nb: '5'\nc: \"true\"", {"a": "5", "b": "5", "c": "true"}, id="text by tag and by quotes"),
    pytest.param("? a\n: b", {"a": "b"}, id="question mark"),
    pytest.param("a: b?\nc: ?d\ne: a#b # c", {"a": "b?", "c": "?d", "e": "a#b"}, id="marks in text"),
    pytest.param("a:\t5", {"a": 5}, id="a tab between"),
]


@pytest.mark.parametrize(("text", "value"), RECORDED)
def test_a_text_is_read_as_kubectl_reads_it(text: str, value: Any) -> None:
    assert parse_documents(text) == [value]


@pytest.mark.parametrize(("text", "value"), RECORDED)
def test_the_kubectl_on_this_machine_still_reads_it_so(kubectl: Callable[[str], Any], text: str, value: Any) -> None:
    assert kubectl(text) == value
