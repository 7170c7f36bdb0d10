"""Watches of jobs and of what belongs to them: every event is told to the cache and says "look at this job again".

List, then watch from the version of the list on, for ever. A version that has expired is answered with a new list,
which replaces what the cache holds: nothing stays in it that vanished unseen. Not kopf: its watches take three times
the CPU for the same events, and after an expired watch do not tell what vanished.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from moejob_operator.actions import Kind
from moejob_operator.api_client import Absent, ApiClient, Expired
from moejob_operator.cache import Cache
from moejob_operator.cluster import Forbidden, JobKey, Raw, Retryable
from moejob_operator.lists import Lists, selected
from moejob_operator.logs import Log

log = Log(__name__)

# Of pod groups only that they are there matters, and who made them was us.
WATCHED = (Kind.JOB, Kind.POD, Kind.SERVICE, Kind.CLAIM)
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 3.0


@dataclass
class Watch:
    """The watch of one kind, in one namespace or in all. `listed` is set once the cache holds all there is of it."""

    kind: Kind
    api: ApiClient
    lists: Lists
    look: Callable[[JobKey], None]
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    _pause: float = _SHORTEST_PAUSE

    @property
    def name(self) -> str:
        """What people call it."""
        namespace = self.lists.namespace
        return f"watch of {self.kind}" if namespace is None else f"watch of {self.kind} in {namespace}"

    async def run(self) -> NoReturn:
        """Watch for ever, whatever the API server does."""
        while True:
            try:
                version = await self._list()
                while True:
                    version = await self._follow(version)
            except Expired:
                log.info("a watch has expired", part=self.name)
            except (Retryable, Forbidden, Absent) as error:
                log.warning("cannot list", part=self.name, error=str(error))
                await self._wait()

    async def _list(self) -> str:
        version = await self.lists.fill(self.kind)
        self.listed.set()
        for key in self.lists.cache.all_keys():
            self.look(key)
        return str(version)

    async def _follow(self, version: str) -> str:
        """Watch until the connection ends. Returns the version from which to go on."""
        [path] = self.lists.paths(self.kind, self.lists.namespace)
        begun = version
        try:
            async for event in self.api.watch(path, selected(self.kind), version):
                version = event["object"]["metadata"]["resourceVersion"]
                told(self.kind, event, self.lists.cache, self.look)
        except Expired:
            raise
        except Retryable as error:
            log.info("a watch goes on", part=self.name, error=str(error))
        if version == begun:
            await self._wait()
        else:
            self._pause = _SHORTEST_PAUSE
        return version

    async def _wait(self) -> None:
        # Spread: all watches of all replicas lose their API server together.
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def told(kind: Kind, event: Raw, cache: Cache, look: Callable[[JobKey], None]) -> None:
    """One event. A bookmark says only that there was nothing else up to a version."""
    raw = event["object"]
    match event["type"]:
        case "DELETED":
            key = cache.gone(kind, raw)
        case "ADDED" | "MODIFIED":
            key = cache.seen(kind, raw)
        case _:
            return
    if key is not None:
        look(key)


def watches(api: ApiClient, lists: Lists, look: Callable[[JobKey], None]) -> tuple[Watch, ...]:
    """One for each kind. `api` is theirs alone: each holds a connection for as long as it lives."""
    return tuple(Watch(kind, api, lists, look) for kind in WATCHED)
