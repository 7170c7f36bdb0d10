"""Lines of logs: of which pod and rank, when, and the merge of several logs by time."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

# `2026-11-28T10:00:00.123456789Z text`, as the kubelet writes a line with its time.
_TIMED_LINE = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?(.*)", re.DOTALL)
# The launcher puts it in front of each line of a rank.
_RANK_LINE = re.compile(r"\[rank (\d{1,9})\] ?(.*)", re.DOTALL)
_BILLION = 1_000_000_000
# Of one log; the others are behind by then.
_MOST_WAITING = 1_000


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a pod, or of one of its ranks."""

    # Since 1970: datetime has no nanoseconds, by which lines of one pod are ordered.
    nanoseconds: int
    pod: str
    node: str
    text: str
    rank: int | None = None

    @property
    def time(self) -> datetime:
        """Return when the line was written, by the clock of its node."""
        return datetime.fromtimestamp(self.nanoseconds / _BILLION, UTC)


def parse_log_line(line: bytes, pod: str, node: str) -> LogLine | None:
    """Read a line with its time; None when it has none."""
    match = _TIMED_LINE.fullmatch(line)
    if match is None:
        return None
    second, fraction, zone, text = match.groups()
    moment = datetime.fromisoformat((second + zone).decode())
    nanoseconds = int(moment.timestamp()) * _BILLION + int((fraction or b"0").ljust(9, b"0"))
    words = text.decode(errors="backslashreplace")
    rank_line = _RANK_LINE.fullmatch(words)
    if rank_line is None:
        return LogLine(nanoseconds, pod, node, words)
    return LogLine(nanoseconds, pod, node, rank_line[2], int(rank_line[1]))


@dataclass(slots=True)
class _MergedLog:
    lines: deque[tuple[float, LogLine]] = field(default_factory=deque)
    is_ended: bool = False
    room: asyncio.Event = field(default_factory=asyncio.Event)


class LogMerger:
    """Several logs as one, by time.

    A line is due when no other log can have an earlier one: each has a line in wait or has ended. A log that is silent
    holds the others up for `patience_seconds` only; without a limit the order is exact.
    """

    def __init__(self, patience_seconds: float | None) -> None:
        self._patience_seconds = patience_seconds
        self._logs: dict[str, _MergedLog] = {}
        self._news = asyncio.Event()
        self._is_closed = False

    def add_log(self, key: str) -> None:
        """Count a log among those that may still have lines."""
        self._logs[key] = _MergedLog()

    def close(self) -> None:
        """Let the merge end with its last log: no further one comes."""
        self._is_closed = True
        self._news.set()

    async def feed_log(self, key: str, lines: AsyncIterator[LogLine]) -> None:
        """Pass the lines of a log on, no faster than they are taken."""
        log, now = self._logs[key], asyncio.get_running_loop().time
        try:
            async for line in lines:
                log.lines.append((now(), line))
                self._news.set()
                while len(log.lines) >= _MOST_WAITING:
                    log.room.clear()
                    await log.room.wait()
        finally:
            log.is_ended = True
            self._news.set()

    async def merge_logs(self) -> AsyncGenerator[LogLine]:
        """Yield the lines of all logs, until each has ended."""
        while True:
            self._news.clear()
            self._logs = {key: log for key, log in self._logs.items() if log.lines or not log.is_ended}
            wait_seconds = self._seconds_until_due()
            if wait_seconds is not None and wait_seconds <= 0:
                yield self._take_earliest()
            elif self._is_closed and not self._logs:
                return
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_seconds):
                        await self._news.wait()

    def _seconds_until_due(self) -> float | None:
        """Return how long the earliest line has to wait; None while that is not known."""
        earliest = min((log.lines[0] for log in self._logs.values() if log.lines), key=_line_time, default=None)
        if earliest is None:
            return None
        if all(log.lines or log.is_ended for log in self._logs.values()):
            return 0.0
        if self._patience_seconds is None:
            return None
        return earliest[0] + self._patience_seconds - asyncio.get_running_loop().time()

    def _take_earliest(self) -> LogLine:
        log = min((log for log in self._logs.values() if log.lines), key=lambda log: _line_time(log.lines[0]))
        if len(log.lines) < _MOST_WAITING:
            log.room.set()
        return log.lines.popleft()[1]


def _line_time(waiting: tuple[float, LogLine]) -> int:
    return waiting[1].nanoseconds
