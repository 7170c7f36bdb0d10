"""Prose of pages has lines of 120 columns; tables, code and measurements may be wider."""

from __future__ import annotations

import pytest

from page_width import COLUMNS, long_lines

LONG = "word " * 25


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        pytest.param(f"# Title\n\n{LONG.strip()}\n", [(3, 124)], id="a long sentence"),
        pytest.param("a" * 60 + " " + "b" * (COLUMNS - 61), [], id="a line that just fits"),
        pytest.param(f"| {LONG} |\n", [], id="a row of a table"),
        pytest.param(f"```console\n$ {LONG}\n```\n", [], id="code"),
        pytest.param(f"<!-- measured: start -->\n{LONG}\n<!-- measured: end -->\n", [], id="measurements"),
        pytest.param(f"```\nx\n```\n{LONG.strip()}\n", [(4, 124)], id="a long sentence behind code"),
        pytest.param(f"- [text](https://example.com/{'a' * COLUMNS})\n", [], id="a link that has no place to break"),
    ],
)
def test_a_line_of_prose_that_is_too_long_is_found(text: str, problems: list[tuple[int, int]]) -> None:
    assert list(long_lines(text)) == problems
