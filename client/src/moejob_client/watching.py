"""A watch that never ends by itself: every object as it is, then every change, through outages and lost versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moejob_api import api_bodies
from moejob_api.api_bodies import Raw
from moejob_client.errors import Expired, Retryable
from moejob_client.failures import JobRequestError, explained_failures

if TYPE_CHECKING:
    from moejob_client.api_client import ApiClient

_PAUSE_SECONDS = 1.0
# Receives the reason when an outage begins, and None when it is over.
ReportOutage = Callable[[str | None], object]


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """An object as a watch reports it; `is_gone`: it was deleted."""

    body: Raw
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection of the API; `title` says in messages of what."""

    path: str
    title: str
    query: Mapping[str, str]


class ObjectWatch:
    """The objects of a collection, over one connection at a time."""

    def __init__(self, http: ApiClient, collection: Collection, report_outage: ReportOutage | None = None) -> None:
        self._http = http
        self._collection = collection
        self._report_outage = report_outage or (lambda _: None)
        self._seen: dict[str, Raw] = {}
        self._version = ""
        self._is_out = False
        self._has_opened = False

    async def list_changes(self) -> AsyncGenerator[ObjectChange]:
        """Yield each object, then every change. The first list may fail; later failures are outages."""
        changes = await self._list_again()
        while True:
            for change in changes:
                yield change
            async for change in self._watch_until_broken():
                yield change
            await asyncio.sleep(_PAUSE_SECONDS)
            changes = [] if self._version else await self._list_patiently()

    async def _watch_until_broken(self) -> AsyncGenerator[ObjectChange]:
        try:
            async for change in self._watch_once():
                yield change
        except JobRequestError as error:
            if isinstance(error.__cause__, Expired):
                self._version = ""
            elif not isinstance(error.__cause__, Retryable):
                raise
            elif not self._has_opened:
                # A watch that breaks is opened again; an outage is one that cannot be.
                self._begin_outage(str(error))

    async def _list_patiently(self) -> list[ObjectChange]:
        while True:
            try:
                return await self._list_again()
            except JobRequestError as error:
                if not isinstance(error.__cause__, Retryable):
                    raise
                self._begin_outage(str(error))
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _list_again(self) -> list[ObjectChange]:
        """Return what has changed since the last list or event."""
        present: dict[str, Raw] = {}
        with explained_failures(f"cannot list {self._collection.title}"):
            async for page in self._http.list_pages(self._collection.path, self._collection.query):
                self._version = page.version
                present |= {_object_name(item): item for item in page.items}
        self._end_outage()
        changes = [ObjectChange(self._seen[name], is_gone=True) for name in self._seen.keys() - present.keys()]
        changes += [ObjectChange(body) for name, body in sorted(present.items()) if self._seen.get(name) != body]
        self._seen = present
        return changes

    async def _watch_once(self) -> AsyncGenerator[ObjectChange]:
        with explained_failures(f"cannot watch {self._collection.title}"):
            self._has_opened = False
            watch = self._http.watch(self._collection.path, self._collection.query, self._version, self._open_watch)
            async for event in watch:
                body = event["object"]
                self._version = body["metadata"]["resourceVersion"]
                if event["type"] == "DELETED":
                    self._seen.pop(_object_name(body), None)
                    yield ObjectChange(body, is_gone=True)
                elif event["type"] != "BOOKMARK":
                    self._seen[_object_name(body)] = body
                    yield ObjectChange(body)

    def _open_watch(self) -> None:
        self._has_opened = True
        self._end_outage()

    def _begin_outage(self, reason: str) -> None:
        if not self._is_out:
            self._is_out = True
            self._report_outage(reason)

    def _end_outage(self) -> None:
        if self._is_out:
            self._is_out = False
            self._report_outage(None)


def _object_name(body: Raw) -> str:
    return api_bodies.as_text(api_bodies.object_metadata(body).get("name"))
