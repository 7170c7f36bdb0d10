"""A record of a data set, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of one line or row, and its place."""

    fields: Mapping[str, object]
    place: str


def without_absent(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Arrow gives every row the keys of all rows; a key without a value was never written."""
    return {key: _present(value) for key, value in fields.items() if value is not None}


def _present(value: object) -> object:
    if isinstance(value, dict):
        return without_absent(value)
    if isinstance(value, list):
        return [_present(item) for item in value]
    return value
