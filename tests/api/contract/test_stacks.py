"""The stacks of ranks as lines of a program: what is written is read, and what is no such line is left out."""

from __future__ import annotations

import pytest

from moejob_api.contract.stacks import RankStacks, parse_stacks_line, stacks_line


def test_what_is_written_is_read() -> None:
    stacks = RankStacks(3, 17, ("Thread 0x1 (most recent call first):", '  File "é.py", line 2 in step'), "late")
    assert parse_stacks_line(stacks_line(stacks)) == stacks


@pytest.mark.parametrize(
    "line",
    ["", "a warning", "[]", "null", '{"rank": 1}', '{"rank": "1", "pid": 2}', '{"rank": true, "pid": 2}', b"\xff"],
)
def test_a_line_of_something_else_is_none(line: str | bytes) -> None:
    assert parse_stacks_line(line) is None


def test_texts_of_a_pod_have_nothing_that_a_terminal_obeys() -> None:
    read = parse_stacks_line('{"rank": 1, "pid": 2, "lines": ["a\\u001b[2J", 3], "problem": "b\\u0007"}')
    assert read == RankStacks(1, 2, ("a [2J", ""), "b ")
