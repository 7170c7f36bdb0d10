"""Watches of what belongs to jobs, their pods above all: every event goes to the cache and asks for a reconcile.

List, then watch from the version of the list on, for ever. A version that has expired is answered with a new list,
which replaces what the cache holds: nothing stays in it that vanished unseen. Jobs are watched by kopf, these are not,
for two reasons. After an expired watch kopf lists again without telling what vanished, and a deletion of a pod that is
missed breaks the promise never to run two gangs. And pods change often: an event costs 32 us of CPU here, in kopf 744,
or 282 with storages that do nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from moejob_client.api_client import ApiClient
from moejob_client.errors import Expired, NotFound
from moejob_operator.actions import Kind
from moejob_operator.cluster import Forbidden, JobKey, Raw, Retryable
from moejob_operator.kube_api.cache import Cache
from moejob_operator.kube_api.live_lists import LiveLists, label_query
from moejob_operator.logs import Log

log = Log(__name__)

# Not pod groups: only their existence matters, and the operator creates them itself.
WATCHED = (Kind.POD, Kind.SERVICE, Kind.CLAIM)
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 3.0


class RetryPauses:
    """Pauses between attempts, doubling, and spread: all watches of all replicas lose their API server together."""

    def __init__(self) -> None:
        self._seconds = _SHORTEST_PAUSE

    def reset(self) -> None:
        """Begin with the shortest one again: an attempt has succeeded."""
        self._seconds = _SHORTEST_PAUSE

    async def wait(self) -> None:
        """Pause before the next attempt."""
        await asyncio.sleep(self._seconds * random.uniform(0.5, 1.0))
        self._seconds = min(2 * self._seconds, _LONGEST_PAUSE)


@dataclass
class Informer:
    """The watch of one kind, in one namespace or in all. `listed` is set once the cache holds all its objects."""

    kind: Kind
    api: ApiClient
    lists: LiveLists
    reconcile: Callable[[JobKey], None]
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    pauses: RetryPauses = field(default_factory=RetryPauses)

    @property
    def name(self) -> str:
        """Return the name of the kind for people."""
        return self.lists.watch_name(self.kind)

    async def run(self) -> NoReturn:
        """Watch for ever, whatever the API server does."""
        while True:
            try:
                version = await self._list_objects()
                while True:
                    version = await self._follow_watch(version)
            except Expired:
                log.info("a watch has expired", part=self.name)
            except (Retryable, Forbidden, NotFound) as error:
                log.warning("cannot list", part=self.name, error=str(error))
                await self.pauses.wait()

    async def _list_objects(self) -> str:
        version = await self.lists.fill_cache(self.kind)
        self.listed.set()
        for key in self.lists.cache.all_keys():
            self.reconcile(key)
        return str(version)

    async def _follow_watch(self, version: str) -> str:
        """Watch until the connection ends; return the version to continue from."""
        [path] = self.lists.api_paths(self.kind, self.lists.namespace)
        start_version = version
        try:
            async for event in self.api.watch(path, label_query(self.kind), version):
                version = event["object"]["metadata"]["resourceVersion"]
                receive_event(self.kind, event, self.lists.cache, self.reconcile)
        except Expired:
            raise
        except Retryable as error:
            log.info("a watch goes on", part=self.name, error=str(error))
        if version == start_version:
            await self.pauses.wait()
        else:
            self.pauses.reset()
        return version


def receive_event(kind: Kind, event: Raw, cache: Cache, reconcile: Callable[[JobKey], None]) -> None:
    """Record one event. A bookmark only says that there was no other event up to its version."""
    raw = event["object"]
    match event["type"]:
        case "DELETED":
            key = cache.record_deletion(kind, raw)
        case "ADDED" | "MODIFIED":
            key = cache.record_object(kind, raw)
        case _:
            return
    if key is not None:
        reconcile(key)


def build_informers(api: ApiClient, lists: LiveLists, reconcile: Callable[[JobKey], None]) -> tuple[Informer, ...]:
    """Return an informer for each kind. `api` serves no other part: each informer holds a connection all the time."""
    return tuple(Informer(kind, api, lists, reconcile) for kind in WATCHED)
