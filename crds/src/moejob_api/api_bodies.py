"""Reading API bodies that may hold anything: a value of an unexpected kind counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from moejob_api.contract.texts import printable_text

# The body of an object, as JSON has it.
Raw = Mapping[str, Any]

_NOTHING: Raw = {}
# Of the largest number that every reader of JSON holds exactly.
_MOST_DIGITS = 16


def as_mapping(value: object) -> Raw:
    """An object; an empty one when the value is something else."""
    return value if isinstance(value, Mapping) else _NOTHING


def as_mappings(value: object) -> tuple[Raw, ...]:
    """The objects in a list."""
    return tuple(item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else ()


def as_text(value: object) -> str:
    """A text without control characters; an empty one when the value is something else."""
    return printable_text(value) if isinstance(value, str) else ""


def last_line(value: object) -> str:
    """Return the last line that is not empty, of the end of a log."""
    lines = value.splitlines() if isinstance(value, str) else []
    return next(filter(None, (as_text(line).strip() for line in reversed(lines))), "")


def as_integer(value: object) -> int | None:
    """A whole number; true and false are none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_restarts(status: Raw) -> int:
    """Return how often the kubelet has restarted containers of a pod, given the status of the pod."""
    counts = (as_integer(container.get("restartCount")) for container in as_mappings(status.get("containerStatuses")))
    return max((count for count in counts if count is not None), default=0)


def as_count(value: object) -> int | None:
    """A whole number that labels write as text."""
    digits = as_text(value)
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS else None


def as_time(value: object) -> datetime | None:
    """A time as Kubernetes writes it."""
    try:
        parsed = datetime.fromisoformat(as_text(value))
    except ValueError:
        return None
    return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)


def find_condition(status: Raw, kind: str) -> Raw:
    """The condition of that type, an empty object when there is none."""
    return next((entry for entry in as_mappings(status.get("conditions")) if entry.get("type") == kind), _NOTHING)


def object_metadata(raw: Raw) -> Raw:
    """The object's metadata."""
    return as_mapping(raw.get("metadata"))


def find_label(raw: Raw, key: str) -> Any:
    """One label; None when it is not there."""
    return as_mapping(object_metadata(raw).get("labels")).get(key)
