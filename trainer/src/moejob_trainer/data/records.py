"""A record of a data set, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of one line or row, and its place."""

    fields: Mapping[str, object]
    place: str
