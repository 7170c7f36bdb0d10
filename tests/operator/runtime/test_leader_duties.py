"""Duties of a leader around its queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from moejob_client.errors import NotFound
from moejob_operator.actions import Kind
from moejob_operator.cluster import Forbidden, JobKey, Retryable
from moejob_operator.kube_api.cache import Cache
from moejob_operator.runtime.leader_duties import Leader
from moejob_operator.runtime.work_queue import RateLimiter, WorkOutcome, WorkQueue
from stand_in_api import stored_object
from virtual_time import run_virtually

KEYS = [JobKey("default", f"job-{number}") for number in range(20)]


class NoMetrics:
    """Forgets every number."""

    def set_queue_depth(self, depth: int) -> None: ...

    def observe_wait(self, waited_seconds: float) -> None: ...

    def observe_work(self, seconds: float, outcome: WorkOutcome) -> None: ...


@dataclass
class FakeLists:
    """Lists as a leader uses them, of a cluster with twenty jobs; the first ones may fail."""

    failures: int = 0
    failure: Exception = field(default_factory=lambda: Retryable("the API server does not answer"))
    cache: Cache = field(default_factory=Cache)
    filled: list[Kind] = field(default_factory=list)
    gangs: Any = None

    def __post_init__(self) -> None:
        self.gangs = self

    async def refresh(self) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise self.failure

    async def fill_cache(self, kind: Kind) -> int:
        self.filled.append(kind)
        for key in KEYS:
            self.cache.record_object(Kind.JOB, stored_object("MoETrainingJob", key.name))
        return 1


@dataclass
class FakeWatch:
    """A watch that has listed when the test says so."""

    listed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Story:
    """A leader, and what its queue was asked to reconcile when."""

    lists: FakeLists = field(default_factory=FakeLists)
    requests: list[tuple[float, JobKey]] = field(default_factory=list)
    leads: list[bool] = field(default_factory=list)
    watch: FakeWatch = field(default_factory=FakeWatch)

    def __post_init__(self) -> None:
        self.watch.listed.set()
        self.queue: WorkQueue[JobKey] = WorkQueue(self.look, NoMetrics(), RateLimiter())
        self.leader = Leader(self.queue, [self.lists], [self.watch], 100.0, self.leads.append)  # type: ignore[list-item]

    async def look(self, key: JobKey) -> None:
        self.requests.append((now(), key))


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_leader_lists_the_jobs_anew_before_it_looks_at_them() -> None:
    async def play() -> None:
        story = Story(FakeLists(failures=3))
        task = asyncio.ensure_future(story.leader.lead())
        await asyncio.sleep(2.5)
        assert story.requests == []
        await asyncio.sleep(1)
        assert story.lists.filled == [Kind.JOB, Kind.POD_GROUP]
        assert [key for _, key in story.requests] == KEYS
        assert story.leads == [True]
        story.queue.stop()
        await task
        assert story.leads == [True, False]

    run_virtually(play())


def test_a_leader_whose_watches_have_not_listed_yet_looks_at_nothing() -> None:
    """Jobs would seem to have lost pods that are only not seen yet."""

    async def play() -> None:
        story = Story()
        story.watch.listed.clear()
        task = asyncio.ensure_future(story.leader.lead())
        await asyncio.sleep(50)
        assert story.lists.filled == []
        story.watch.listed.set()
        await asyncio.sleep(1)
        assert len(story.requests) == len(KEYS)
        task.cancel()
        await asyncio.wait({task})

    run_virtually(play())


def test_every_job_is_looked_at_now_and_then_and_never_all_at_once() -> None:
    async def play() -> None:
        story = Story()
        task = asyncio.ensure_future(story.leader.lead())
        await asyncio.sleep(1001)
        for period in range(9):
            seen = {key for at, key in story.requests if 100 * period < at <= 100 * (period + 2)}
            assert seen == set(KEYS)
        at_once = [at for at, _ in story.requests if at > 1]
        assert len(set(at_once)) == len(at_once)
        task.cancel()
        await asyncio.wait({task})

    run_virtually(play())


@pytest.mark.parametrize(
    "failure", [Retryable("no answer"), Forbidden("no right"), NotFound("404 page not found")], ids=repr
)
def test_a_list_that_fails_later_ends_nothing(failure: Exception) -> None:
    async def play() -> None:
        story = Story(FakeLists(failure=failure))
        task = asyncio.ensure_future(story.leader.lead())
        await asyncio.sleep(10)
        story.lists.failures = 3
        await asyncio.sleep(1000)
        assert not task.done()
        assert len(story.lists.filled) == 2 + 7
        task.cancel()
        await asyncio.wait({task})

    run_virtually(play())
