"""Marks rows of long tables: `make test` does those that are named, `make test-thorough` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def make_rows(table: Iterable[object], always: Collection[object]) -> list[object]:
    """The rows of a table, a tuple being one of several values."""
    every = [*table]
    unknown = [row for row in always if row not in every]
    if unknown:
        raise ValueError(f"{unknown} are no rows of the table; it has {every}")
    return [pytest.param(*_values(row), marks=() if row in always else pytest.mark.thorough) for row in every]


def _values(row: object) -> tuple[object, ...]:
    return row if isinstance(row, tuple) else (row,)
