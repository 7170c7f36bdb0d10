"""The page of features proves what it claims: every row has a state, and every state what belongs to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([A-F])(\d+) \| ([^|]+) \| ([^|]+) \| ([^|]*) ?\|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)`")
# States that a reader would have to take on trust, were there no test.
PROVEN = {"works", "otherwise", "refused"}
UNPROVEN = {"not yet", "not ours"}


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    section: str
    number: int
    feature: str
    state: str
    proof: str


ROWS = [Row(section, int(number), *(one.strip() for one in rest)) for section, number, *rest in ROW.findall(PAGE)]


def test_every_line_of_a_table_is_a_row_and_no_number_is_left_out() -> None:
    lines = re.findall(r"^\| [A-F]\d+ ", PAGE, re.MULTILINE)
    assert len(lines) == len(ROWS) > 130
    for section in "ABCDEF":
        numbers = [row.number for row in ROWS if row.section == section]
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}{row.number}")
def test_a_state_is_proven_by_tests_that_are_there(row: Row) -> None:
    tests = TEST.findall(row.proof)
    assert row.state in PROVEN | UNPROVEN
    assert row.state in UNPROVEN or tests
    assert row.proof
    assert [path for path in tests if not (ROOT / path).is_file()] == []
