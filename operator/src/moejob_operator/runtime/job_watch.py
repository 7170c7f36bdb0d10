"""The watch of jobs, which is kopf's: what its events and lists mean for the cache, and whether it is alive.

kopf reports every event, but after an expired watch it lists again and reports no job that vanished meanwhile. So this
module records every list as a whole, too: the cache then holds exactly the listed jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import kopf

from moejob_client.api_client import Listing
from moejob_operator.actions import Kind
from moejob_operator.cluster import JobKey, Raw
from moejob_operator.kube_api.cache import Cache, slim_object
from moejob_operator.kube_api.informers import RetryPauses
from moejob_operator.kube_api.live_lists import LiveLists
from moejob_operator.logs import Log

log = Log(__name__)

# kopf restarts a watch that was silent for this long; a bookmark comes every minute.
INACTIVITY_SECONDS = 75.0
# More than that, the deadline of a request and the longest pause together: kopf has stopped asking.
DEAD_SECONDS = 120.0


@dataclass
class JobWatch:
    """kopf's watch of jobs in one namespace or in all. `listed` is set once the cache holds all of them."""

    lists: LiveLists
    reconcile: Callable[[JobKey], None]
    clock: Callable[[], float] = time.monotonic
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    pauses: RetryPauses = field(default_factory=RetryPauses)
    _pages: list[Raw] = field(default_factory=list)
    _active_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.touch()

    @property
    def name(self) -> str:
        """Name of the watch, for people."""
        return self.lists.watch_name(Kind.JOB)

    @property
    def path(self) -> str:
        """Path of the collection."""
        [path] = self.lists.api_paths(Kind.JOB, self.lists.namespace)
        return path

    @property
    def is_dead(self) -> bool:
        """True when kopf has sent and received nothing for longer than it ever waits."""
        return self.clock() - self._active_at > DEAD_SECONDS

    def touch(self) -> None:
        """Note that kopf sends a request or receives a response."""
        self._active_at = self.clock()

    def take_page(self, page: Listing, *, is_first: bool, is_last: bool) -> None:
        """Record a page of a list; after the last one the cache holds exactly the listed jobs."""
        if is_first:
            self._pages = []
        self._pages += (slim_object(Kind.JOB, raw) for raw in page.items)
        if not is_last:
            return
        self.lists.replace_cached(Kind.JOB, self._pages, int(page.version))
        self._pages = []
        self.listed.set()
        for key in self.lists.cache.all_keys():
            self.reconcile(key)


def receive_job_event(event: kopf.RawEvent, cache: Cache, reconcile: Callable[[JobKey], None]) -> None:
    """Record an event from kopf; an event without a type comes from a list."""
    raw = event["object"]
    key = cache.record_deletion(Kind.JOB, raw) if event["type"] == "DELETED" else cache.record_object(Kind.JOB, raw)
    log.debug("event of a job", type=event["type"], job=raw["metadata"]["name"], is_news=key is not None)
    if key is not None:
        reconcile(key)
