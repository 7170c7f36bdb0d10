"""The glossary points at what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {
    "trainer": "trainer/src/moejob_trainer",
    "api": "crds/src/moejob_api",
    "operator": "operator/src/moejob_operator",
}
ROWS = [
    row.split(" | ")
    for row in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    if row.startswith("| ") and not row.startswith("| term")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].removeprefix("| "))
def test_a_term_lives_where_the_glossary_says(row: list[str]) -> None:
    found = re.fullmatch(r"`(\w+)/(.+)`", row[2])
    assert found is not None, row[2]
    assert (ROOT / ROOMS[found[1]] / found[2]).exists()


def test_no_term_is_there_twice() -> None:
    terms = [row[0] for row in ROWS]
    assert len(terms) == len(set(terms)) >= 60
