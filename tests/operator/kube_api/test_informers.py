"""Watches: what an event leads to, and that they go on whatever the API server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moejob_api.contract.pods import Label
from moejob_operator.actions import Kind
from moejob_operator.cluster import JobKey
from moejob_operator.kube_api.cache import Cache
from moejob_operator.kube_api.informers import WATCHED, Informer, build_informers, receive_event
from moejob_operator.kube_api.live_lists import GangApis, LiveLists
from stand_in_api import Answer, StandInServer, list_answer, refusal_answer, serve_stand_in, stored_object

KEY = JobKey("default", "job")
LIST, WATCH = "GET /api/v1/pods", "GET /api/v1/pods?watch"


def pod(version: int, name: str = "a", job: str | None = "job") -> dict[str, Any]:
    return stored_object("Pod", name, version, labels={} if job is None else {Label.JOB.value: job})


def events(*lines: tuple[str, dict[str, Any]]) -> Answer:
    """Return what a watch says before the API server ends it."""
    return 200, "".join(json.dumps({"type": kind, "object": raw}) + "\n" for kind, raw in lines)


def bookmark(version: int) -> tuple[str, dict[str, Any]]:
    return "BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}


# --- one event ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "requests", "pods"),
    [
        pytest.param([("ADDED", pod(1))], 1, 1, id="a pod came"),
        pytest.param([("ADDED", pod(1)), ("MODIFIED", pod(2))], 2, 1, id="a pod changed"),
        pytest.param([("ADDED", pod(1)), ("DELETED", pod(2))], 2, 0, id="a pod went"),
        pytest.param([("MODIFIED", pod(2)), ("ADDED", pod(1))], 1, 1, id="old news"),
        pytest.param([("ADDED", pod(1, job=None))], 0, 0, id="nobody's pod"),
        pytest.param([bookmark(7)], 0, 0, id="no news"),
        pytest.param([("SOMETHING", pod(1))], 0, 0, id="an event of a later Kubernetes"),
    ],
)
def test_every_event_reaches_the_cache_and_asks_for_a_reconcile(story: list[Any], requests: int, pods: int) -> None:
    cache, requested = Cache(), list[JobKey]()
    for kind, raw in story:
        receive_event(Kind.POD, {"type": kind, "object": raw}, cache, requested.append)
    assert requested == [KEY] * requests
    assert len(cache.find_children(KEY).pods) == pods


# --- watches --------------------------------------------------------------------------------------------------------


class Watched:
    """A watch of pods that runs against a stand-in."""

    def __init__(self, server: StandInServer, lists: LiveLists, watch: Informer, requests: list[JobKey]) -> None:
        self.server, self.lists, self.watch, self.requests = server, lists, watch, requests
        self.task = asyncio.ensure_future(watch.run())

    @property
    def names(self) -> set[str]:
        return {found["metadata"]["name"] for found in self.lists.cache.find_children(KEY).pods}

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + 10
        while not condition():
            assert not self.task.done()
            assert asyncio.get_running_loop().time() < deadline, (self.server.calls[-10:], self.names)
            await asyncio.sleep(0.01)

    def begun_at(self) -> list[str]:
        """From which version each watch so far went on."""
        return [asked.query["resourceVersion"] for asked in self.server.requests if "watch" in asked.query]

    def lists_made(self) -> int:
        return sum("watch" not in asked.query for asked in self.server.requests)


@asynccontextmanager
async def watched(*, lists: list[Answer], watch: list[Answer]) -> AsyncIterator[Watched]:
    async with serve_stand_in() as (server, api):
        server.set_answers(LIST, *lists)
        # When all is said, a watch stays open.
        server.set_answers(WATCH, *watch, (-1, ""))
        requests: list[JobKey] = []
        found = LiveLists(api, Cache(), None, GangApis(api))
        story = Watched(server, found, Informer(Kind.POD, api, found, requests.append), requests)
        try:
            yield story
        finally:
            story.task.cancel()
            await asyncio.wait({story.task})


def test_a_watch_begins_with_a_list_and_goes_on_from_its_version() -> None:
    async def story() -> None:
        async with watched(
            lists=[list_answer(pod(4), version="10")], watch=[events(("ADDED", pod(12, "b")), ("DELETED", pod(13)))]
        ) as seen:
            assert not seen.watch.listed.is_set()
            await seen.until(lambda: seen.names == {"b"})
            assert seen.watch.listed.is_set()
            await seen.until(lambda: len(seen.begun_at()) == 2)
            assert seen.begun_at() == ["10", "13"]
            assert seen.lists_made() == 1
            assert seen.server.requests[1].query["labelSelector"] == "app.kubernetes.io/managed-by=moejob"

    asyncio.run(story())


def test_a_bookmark_moves_the_version_from_which_a_watch_goes_on() -> None:
    async def story() -> None:
        async with watched(lists=[list_answer(version="10")], watch=[events(bookmark(500))]) as seen:
            await seen.until(lambda: seen.begun_at() == ["10", "500"])

    asyncio.run(story())


EXPIRED_LINE = events(("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}))


@pytest.mark.parametrize(
    "expired",
    [
        pytest.param(EXPIRED_LINE, id="said in the stream"),
        pytest.param(refusal_answer(410, "Expired"), id="said at once"),
    ],
)
def test_after_an_expired_watch_what_vanished_unseen_is_gone(expired: Answer) -> None:
    async def story() -> None:
        async with watched(
            lists=[
                list_answer(pod(1), pod(2, "b"), version="10"),
                list_answer(pod(2, "b"), pod(15, "c"), version="20"),
            ],
            watch=[expired],
        ) as seen:
            await seen.until(lambda: seen.names == {"b", "c"})
            await seen.until(lambda: seen.begun_at() == ["10", "20"])

    asyncio.run(story())


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(refusal_answer(500, "InternalError"), id="a broken API server"),
        pytest.param(refusal_answer(429, "TooManyRequests"), id="too many requests"),
        pytest.param(events(("ERROR", {"code": 500, "message": "etcd is away"})), id="an error in the stream"),
        pytest.param((200, '{"type": "ADDED", "obj'), id="cut off in the middle of a line"),
        pytest.param((200, "<html>\n"), id="a line of somebody else"),
        pytest.param((200, "{}\n"), id="an event that is none"),
        pytest.param((200, ""), id="ended at once"),
    ],
)
def test_a_watch_that_breaks_goes_on_where_it_was(trouble: Answer) -> None:
    async def story() -> None:
        async with watched(
            lists=[list_answer(pod(1), version="10")], watch=[trouble, trouble, events(("ADDED", pod(11, "b")))]
        ) as seen:
            await seen.until(lambda: seen.names == {"a", "b"})
            assert seen.begun_at()[:3] == ["10", "10", "10"]
            assert seen.lists_made() == 1

    asyncio.run(story())


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(refusal_answer(503, "ServiceUnavailable"), id="no API server"),
        pytest.param(refusal_answer(403, "Forbidden"), id="no right yet"),
        pytest.param(refusal_answer(404, "NotFound"), id="no CRD yet"),
    ],
)
def test_a_list_is_tried_until_it_works(trouble: Answer) -> None:
    async def story() -> None:
        async with watched(lists=[trouble, trouble, list_answer(pod(1))], watch=[]) as seen:
            await seen.until(lambda: seen.names == {"a"})
            assert seen.lists_made() == 3

    asyncio.run(story())


def test_every_job_is_looked_at_after_a_list() -> None:
    async def story() -> None:
        async with watched(lists=[list_answer(pod(1), pod(2, "b", job="other"))], watch=[]) as seen:
            await seen.until(lambda: len(seen.requests) == 2)
            assert set(seen.requests) == {KEY, JobKey("default", "other")}

    asyncio.run(story())


def test_an_event_of_a_megabyte_is_read_whole() -> None:
    async def story() -> None:
        large = pod(11, "b") | {"status": {"message": "x" * 1_000_000}}
        async with watched(
            lists=[list_answer(version="10")], watch=[events(("ADDED", large), ("ADDED", pod(12, "c")))]
        ) as seen:
            await seen.until(lambda: seen.names == {"b", "c"})

    asyncio.run(story())


def test_of_an_operator_for_one_namespace_all_watches_are_of_that_namespace() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            lists = LiveLists(api, Cache(), "default", GangApis(api))
            tasks = [asyncio.ensure_future(watch.run()) for watch in build_informers(api, lists, lambda _: None)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert len(tasks) == len(WATCHED)
            assert all("/namespaces/default/" in asked.path for asked in server.requests)

    asyncio.run(story())
