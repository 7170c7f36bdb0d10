"""The keyed work queue: which job is reconciled when, by how many at once, and how soon again after a failure.

Knows keys and times, nothing of jobs or clusters. Schedule is the bookkeeping and never waits; WorkQueue waits.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Generic, Protocol, TypeVar

from moejob_operator.logs import Log

log = Log(__name__)

Key = TypeVar("Key", bound=Hashable)
# Returns the seconds until the next work on the key, if no event comes before; None waits for an event.
Work = Callable[[Key], Awaitable[float | None]]

# Entries that an earlier time has replaced stay in the heap; this many are not worth clearing away.
_FEW = 64


class WorkOutcome(StrEnum):
    """The end of one piece of work, for the metrics."""

    DONE = "done"
    RETRIED = "retried"
    BROKEN = "broken"
    CANCELLED = "cancelled"


class QueueMetrics(Protocol):
    """The metrics of the queue."""

    def queued(self, depth: int) -> None:
        """Set the number of waiting keys, those for later included."""

    def started(self, waited_seconds: float) -> None:
        """Observe how long after it was due the work on a key begins."""

    def ended(self, seconds: float, outcome: WorkOutcome) -> None:
        """The work on a key ended."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds until a failed key is tried again: doubling, capped, spread so that keys that failed together part."""

    first_seconds: float = 0.1
    cap_seconds: float = 30.0

    def seconds(self, failures: int, chance: float) -> float:
        """After this many failures in a row; `chance` in [0, 1) picks from the upper half of the range."""
        # Beyond 64 doublings the cap has long won, and a float would overflow.
        full = min(self.cap_seconds, self.first_seconds * 2.0 ** min(failures - 1, 64))
        return full * (1.0 + chance) / 2.0


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """Limits on how much is done at once and how often. `spacing_seconds` lie between two starts of one key."""

    workers: int = 64
    spacing_seconds: float = 0.0
    backoff: Backoff = Backoff()
    chance: Callable[[], float] = random.random


class Schedule(Generic[Key]):
    """Keys and when each is due. A key is held once, and never handed out while it is being worked on."""

    def __init__(self, spacing_seconds: float = 0.0) -> None:
        """`spacing_seconds` lie between two starts of one key: one reconcile sees all events in between."""
        self._spacing = spacing_seconds
        self._heap: list[tuple[float, int, Key]] = []
        self._due: dict[Key, tuple[float, int]] = {}
        self._at_work: dict[Key, float] = {}
        self._again: dict[Key, float] = {}
        self._started: dict[Key, float] = {}
        self._starts: deque[tuple[float, Key]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: Key, at: float) -> None:
        """Make a key due at a time, or earlier if it is; one being worked on comes up again after."""
        if key in self._at_work:
            self._again[key] = min(at, self._again.get(key, at))
            return
        if key in self._started:
            at = max(at, self._started[key] + self._spacing)
        if key in self._due and self._due[key][0] <= at:
            return
        self._count += 1
        self._due[key] = (at, self._count)
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._due) + _FEW:
            self._heap = [(due, count, held) for held, (due, count) in self._due.items()]
            heapq.heapify(self._heap)

    def take(self, now: float) -> tuple[Key, float] | None:
        """Take the key that has been due for longest, with its due time; it counts as worked on until its work ends."""
        at = self.next_at()
        if at is None or at > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._at_work[key] = now
        return key, at

    def done(self, key: Key, now: float) -> None:
        """The work on a key has ended; what was added meanwhile is due now."""
        self._remember(key, self._at_work.pop(key), now)
        again = self._again.pop(key, None)
        if again is not None:
            self.add(key, again)

    def next_at(self) -> float | None:
        """Return when the next key is due; None when there is none."""
        while self._heap:
            at, count, key = self._heap[0]
            if self._due.get(key) == (at, count):
                return at
            heapq.heappop(self._heap)
        return None

    def _remember(self, key: Key, started: float, now: float) -> None:
        if self._spacing == 0.0:
            return
        self._started[key] = started
        self._starts.append((started, key))
        # Long work may stand in front of short work here: that only keeps a few entries for longer.
        while self._starts and self._starts[0][0] + self._spacing <= now:
            old, forgotten = self._starts.popleft()
            if self._started.get(forgotten) == old:
                del self._started[forgotten]


class WorkQueue(Generic[Key]):
    """Works on keys, several at once, one at a time each, until stopped."""

    def __init__(
        self,
        work: Work[Key],
        metrics: QueueMetrics,
        pace: RateLimiter,
        expected: tuple[type[Exception], ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`expected` are errors that say "try again"; any other is a bug: logged with its traceback, tried again."""
        self._work = work
        self._metrics = metrics
        self._pace = pace
        self._expected = expected
        self._agenda: Schedule[Key] = Schedule(pace.spacing_seconds)
        self._failures: dict[Key, int] = {}
        self._clock = clock
        self._seconds: dict[Key, float] = {}
        self._tasks: set[asyncio.Task[float | None]] = set()
        self._news = asyncio.Event()
        self._is_stopping = False

    def add(self, key: Key, after_seconds: float = 0.0) -> None:
        """Make a key due, now or later; of several times the earliest counts."""
        self._agenda.add(key, _now() + after_seconds)
        self._metrics.queued(len(self._agenda))
        self._news.set()

    def stop(self) -> None:
        """Begin nothing more; `run` returns once the work in hand has ended."""
        self._is_stopping = True
        self._news.set()

    async def run(self) -> None:
        """Work until stopped. Cancelled, it cancels the work in hand and keeps its keys for the next run."""
        try:
            while not self._is_stopping:
                self._begin_due()
                await self._something()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            while self._tasks:
                await asyncio.wait(self._tasks)

    def _begin_due(self) -> None:
        self._news.clear()
        while len(self._tasks) < self._pace.workers and (taken := self._agenda.take(_now())) is not None:
            key, due = taken
            waited = _now() - due
            self._metrics.queued(len(self._agenda))
            self._metrics.started(waited)
            log.debug("reconcile begins", key=key, waited_seconds=round(waited, 6))
            # A task of its own: whatever it raises stays in it, and no other key notices.
            task = asyncio.ensure_future(self._begun(key))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, key))

    async def _begun(self, key: Key) -> float | None:
        # Not by the loop's clock: uvloop's counts whole milliseconds, and stands still while others work.
        started = self._clock()
        try:
            return await self._work(key)
        finally:
            self._seconds[key] = self._clock() - started

    async def _something(self) -> None:
        due = self._agenda.next_at() if len(self._tasks) < self._pace.workers else None
        try:
            async with asyncio.timeout_at(due):
                await self._news.wait()
        except TimeoutError:
            return

    def _ended(self, key: Key, task: asyncio.Task[float | None]) -> None:
        self._tasks.discard(task)
        self._agenda.done(key, _now())
        # Work that was cancelled before its first step took no time.
        seconds, outcome = self._seconds.pop(key, 0.0), self._settle(task, key)
        self._metrics.ended(seconds, outcome)
        log.debug("reconcile ends", key=key, seconds=round(seconds, 6), outcome=outcome)
        self._metrics.queued(len(self._agenda))
        self._news.set()

    def _settle(self, task: asyncio.Task[float | None], key: Key) -> WorkOutcome:
        if task.cancelled():
            # Cancelled work is due again: the next leader begins with it.
            self._agenda.add(key, _now())
            return WorkOutcome.CANCELLED
        error = task.exception()
        if error is not None:
            return self._retry(key, error)
        self._failures.pop(key, None)
        again_after = task.result()
        if again_after is not None:
            self._agenda.add(key, _now() + again_after)
        return WorkOutcome.DONE

    def _retry(self, key: Key, error: BaseException) -> WorkOutcome:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = self._pace.backoff.seconds(failures, self._pace.chance())
        self._agenda.add(key, _now() + delay)
        if isinstance(error, self._expected):
            log.info("will be tried again", key=key, after_seconds=round(delay, 3), failures=failures, error=str(error))
            return WorkOutcome.RETRIED
        log.error("bug in a reconcile", raised=error, key=key, after_seconds=round(delay, 3), failures=failures)
        return WorkOutcome.BROKEN


def _now() -> float:
    return asyncio.get_running_loop().time()
