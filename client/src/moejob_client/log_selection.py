"""The lines of a job's logs that are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class LogSelection:
    """The lines that are wanted; None and False choose nothing."""

    rank: int | None = None
    # The rank, or the pod, that the last failure is blamed on.
    is_failed: bool = False
    node: str | None = None
    since: timedelta | None = None
    attempt: int | None = None
    # The attempt before the newest.
    is_previous: bool = False


ALL_LINES = LogSelection()
