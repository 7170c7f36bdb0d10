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

    def set_queue_depth(self, depth: int) -> None:
        """Set the number of waiting keys, those for later included."""

    def observe_wait(self, waited_seconds: float) -> None:
        """Observe how long after it was due the work on a key begins."""

    def observe_work(self, seconds: float, outcome: WorkOutcome) -> None:
        """The work on a key ended."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds until a failed key is tried again: doubling, capped, spread so that keys that failed together part."""

    first_seconds: float = 0.1
    cap_seconds: float = 30.0

    def delay_seconds(self, failures: int, chance: float) -> float:
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
        self._due_again: dict[Key, float] = {}
        self._started_at: dict[Key, float] = {}
        self._starts: deque[tuple[float, Key]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: Key, at: float) -> None:
        """Make a key due at a time, or earlier if it is; one being worked on comes up again after."""
        if key in self._at_work:
            self._due_again[key] = min(at, self._due_again.get(key, at))
            return
        if key in self._started_at:
            at = max(at, self._started_at[key] + self._spacing)
        if key in self._due and self._due[key][0] <= at:
            return
        self._count += 1
        self._due[key] = (at, self._count)
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._due) + _FEW:
            self._heap = [(due, count, waiting_key) for waiting_key, (due, count) in self._due.items()]
            heapq.heapify(self._heap)

    def take_due(self, now: float) -> tuple[Key, float] | None:
        """Take the key that has been due for longest, with its due time; it counts as worked on until its work ends."""
        at = self.next_at()
        if at is None or at > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._at_work[key] = now
        return key, at

    def finish_key(self, key: Key, now: float) -> None:
        """The work on a key has ended; what was added meanwhile is due now."""
        self._remember_start(key, self._at_work.pop(key), now)
        due_again = self._due_again.pop(key, None)
        if due_again is not None:
            self.add(key, due_again)

    def next_at(self) -> float | None:
        """Return when the next key is due; None when there is none."""
        while self._heap:
            at, count, key = self._heap[0]
            if self._due.get(key) == (at, count):
                return at
            heapq.heappop(self._heap)
        return None

    def _remember_start(self, key: Key, started: float, now: float) -> None:
        if self._spacing == 0.0:
            return
        self._started_at[key] = started
        self._starts.append((started, key))
        # Long work may stand in front of short work here: that only keeps a few entries for longer.
        while self._starts and self._starts[0][0] + self._spacing <= now:
            oldest, oldest_key = self._starts.popleft()
            if self._started_at.get(oldest_key) == oldest:
                del self._started_at[oldest_key]


class WorkQueue(Generic[Key]):
    """Works on keys, several at once, one at a time each, until stopped."""

    def __init__(
        self,
        work: Work[Key],
        metrics: QueueMetrics,
        rate_limiter: RateLimiter,
        expected: tuple[type[Exception], ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`expected` are errors that say "try again"; any other is a bug: logged with its traceback, tried again."""
        self._work = work
        self._metrics = metrics
        self._rate_limiter = rate_limiter
        self._expected = expected
        self._schedule: Schedule[Key] = Schedule(rate_limiter.spacing_seconds)
        self._failures: dict[Key, int] = {}
        self._clock = clock
        self._work_seconds: dict[Key, float] = {}
        self._tasks: set[asyncio.Task[float | None]] = set()
        self._news = asyncio.Event()
        self._is_stopping = False

    def add(self, key: Key, after_seconds: float = 0.0) -> None:
        """Make a key due, now or later; of several times the earliest counts."""
        self._schedule.add(key, _loop_time() + after_seconds)
        self._metrics.set_queue_depth(len(self._schedule))
        self._news.set()

    def stop(self) -> None:
        """Begin nothing more; `run` returns once the work in hand has ended."""
        self._is_stopping = True
        self._news.set()

    async def run(self) -> None:
        """Work until stopped. Cancelled, it cancels the work in hand and keeps its keys for the next run."""
        try:
            while not self._is_stopping:
                self._start_due_work()
                await self._wait_for_news()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            while self._tasks:
                await asyncio.wait(self._tasks)

    def _start_due_work(self) -> None:
        self._news.clear()
        while (
            len(self._tasks) < self._rate_limiter.workers
            and (due_key := self._schedule.take_due(_loop_time())) is not None
        ):
            key, due = due_key
            waited_seconds = _loop_time() - due
            self._metrics.set_queue_depth(len(self._schedule))
            self._metrics.observe_wait(waited_seconds)
            log.debug("reconcile begins", key=key, waited_seconds=round(waited_seconds, 6))
            # A task of its own: whatever it raises stays in it, and no other key notices.
            task = asyncio.ensure_future(self._run_work(key))
            self._tasks.add(task)
            task.add_done_callback(partial(self._finish_work, key))

    async def _run_work(self, key: Key) -> float | None:
        # Not by the loop's clock: uvloop's counts whole milliseconds, and stands still while others work.
        started = self._clock()
        try:
            return await self._work(key)
        finally:
            self._work_seconds[key] = self._clock() - started

    async def _wait_for_news(self) -> None:
        due = self._schedule.next_at() if len(self._tasks) < self._rate_limiter.workers else None
        try:
            async with asyncio.timeout_at(due):
                await self._news.wait()
        except TimeoutError:
            return

    def _finish_work(self, key: Key, task: asyncio.Task[float | None]) -> None:
        self._tasks.discard(task)
        self._schedule.finish_key(key, _loop_time())
        # Work that was cancelled before its first step took no time.
        seconds, outcome = self._work_seconds.pop(key, 0.0), self._settle_outcome(task, key)
        self._metrics.observe_work(seconds, outcome)
        log.debug("reconcile ends", key=key, seconds=round(seconds, 6), outcome=outcome)
        self._metrics.set_queue_depth(len(self._schedule))
        self._news.set()

    def _settle_outcome(self, task: asyncio.Task[float | None], key: Key) -> WorkOutcome:
        if task.cancelled():
            # Cancelled work is due again: the next leader begins with it.
            self._schedule.add(key, _loop_time())
            return WorkOutcome.CANCELLED
        error = task.exception()
        if error is not None:
            return self._retry_later(key, error)
        self._failures.pop(key, None)
        again_after = task.result()
        if again_after is not None:
            self._schedule.add(key, _loop_time() + again_after)
        return WorkOutcome.DONE

    def _retry_later(self, key: Key, error: BaseException) -> WorkOutcome:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = self._rate_limiter.backoff.delay_seconds(failures, self._rate_limiter.chance())
        self._schedule.add(key, _loop_time() + delay)
        if isinstance(error, self._expected):
            log.info("will be tried again", key=key, after_seconds=round(delay, 3), failures=failures, error=str(error))
            return WorkOutcome.RETRIED
        log.error("bug in a reconcile", raised=error, key=key, after_seconds=round(delay, 3), failures=failures)
        return WorkOutcome.BROKEN


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
