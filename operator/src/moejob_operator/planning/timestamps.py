"""Times as the status keeps them: whole seconds, as everywhere in Kubernetes."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def format_time(time: datetime) -> str:
    """Write a time as Kubernetes does, cut to the second."""
    return time.astimezone(UTC).strftime(_FORMAT)


def cut_to_seconds(time: datetime) -> datetime:
    """Cut a time to the second: then durations between written times add up."""
    return time.replace(microsecond=0)


def parse_time(text: str | None) -> datetime | None:
    """Read a time of the status; None when it is absent or no time."""
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


def time_after(now: datetime, seconds: float) -> str:
    """Write the time a number of seconds from now, and not a moment before."""
    moment = now.timestamp() + seconds
    # Rounded up: a back-off that is cut to the second would end early.
    return format_time(datetime.fromtimestamp(math.ceil(moment) if seconds > 0 else moment, UTC))


def seconds_until(text: str | None, now: datetime) -> float:
    """Seconds until a time that the status holds; 0 when it has passed or is not set."""
    moment = parse_time(text)
    return 0.0 if moment is None else max(0.0, (moment - now).total_seconds())


def seconds_since(moment: datetime | None, now: datetime) -> float:
    """Seconds since a time; 0 when it is unknown, or ahead by another machine's clock."""
    return 0.0 if moment is None else max(0.0, (now - moment) / timedelta(seconds=1))


def shortest_wait(*seconds: float | None) -> float | None:
    """The shortest of several waits; None when there is nothing to wait for."""
    return min((wait for wait in seconds if wait is not None), default=None)
