"""Reading API bodies that may hold anything: whatever is not of the expected kind is absent."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from moejob_api.contract.pods import printable
from moejob_operator.cluster import Raw

_NOTHING: Raw = {}
# Of the largest number that every reader of JSON holds exactly.
_MOST_DIGITS = 16


def mapping(value: object) -> Raw:
    """An object; an empty one when the value is something else."""
    return value if isinstance(value, Mapping) else _NOTHING


def mappings(value: object) -> tuple[Raw, ...]:
    """The objects in a list."""
    return tuple(item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else ()


def text(value: object) -> str:
    """A text without control characters; an empty one when the value is something else."""
    return printable(value) if isinstance(value, str) else ""


def last_line(value: object) -> str:
    """Return the last line that is not empty, of the end of a log."""
    lines = value.splitlines() if isinstance(value, str) else []
    return next(filter(None, (text(line).strip() for line in reversed(lines))), "")


def whole(value: object) -> int | None:
    """A whole number; true and false are none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def count(value: object) -> int | None:
    """A whole number that labels write as text."""
    written = text(value)
    return int(written) if written.isascii() and written.isdigit() and len(written) <= _MOST_DIGITS else None


def time(value: object) -> datetime | None:
    """A time as Kubernetes writes it."""
    try:
        read = datetime.fromisoformat(text(value))
    except ValueError:
        return None
    return read.replace(tzinfo=UTC) if read.tzinfo is None else read.astimezone(UTC)


def condition(status: Raw, kind: str) -> Raw:
    """The condition of that type, an empty object when there is none."""
    return next((found for found in mappings(status.get("conditions")) if found.get("type") == kind), _NOTHING)


def metadata(raw: Raw) -> Raw:
    """The object's metadata."""
    return mapping(raw.get("metadata"))


def label(raw: Raw, key: str) -> Any:
    """One label; None when it is not there."""
    return mapping(metadata(raw).get("labels")).get(key)
