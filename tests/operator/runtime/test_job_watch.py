"""kopf's watch of jobs: what its events and lists lead to, and that it continues whatever the API server answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest

from moejob_api.job import GROUP, PLURAL, VERSION
from moejob_operator.actions import Kind
from moejob_operator.cluster import JobKey
from moejob_operator.kube_api.cache import Cache
from moejob_operator.kube_api.live_lists import GangApis, LiveLists
from moejob_operator.runtime.job_watch import DEAD_SECONDS, JobWatch, receive_job_event
from moejob_operator.runtime.kopf_session import KopfSession
from moejob_operator.runtime.kopf_settings import configure_kopf
from stand_in_api import (
    Answer,
    StandInServer,
    api_groups,
    api_resources,
    list_answer,
    refusal_answer,
    serve_stand_in,
    stored_object,
)

API = f"{GROUP}/{VERSION}"
LIST, WATCH = f"GET /apis/{API}/{PLURAL}", f"GET /apis/{API}/{PLURAL}?watch"


def make_job_body(version: int, name: str = "a", uid: str = "") -> dict[str, Any]:
    metadata = {"uid": uid or f"uid-{name}"}
    return stored_object("MoETrainingJob", name, version, metadata=metadata, apiVersion=API)


def jobs(*items: Any, version: str = "100", more: str = "") -> Answer:
    return list_answer(*items, kind="MoETrainingJobList", api=API, version=version, more=more)


def events(*lines: tuple[str, dict[str, Any]]) -> Answer:
    """Return what a watch says before the API server ends it."""
    return 200, "".join(json.dumps({"type": kind, "object": raw}) + "\n" for kind, raw in lines)


def bookmark(version: int) -> tuple[str, dict[str, Any]]:
    return "BOOKMARK", {"kind": "MoETrainingJob", "metadata": {"resourceVersion": str(version)}}


class Watched:
    """kopf, watching jobs of a stand-in through our session."""

    def __init__(
        self, server: StandInServer, lists: LiveLists, session: KopfSession, watch: JobWatch, requests: list[JobKey]
    ) -> None:
        self.server, self.lists, self.watch, self.requests = server, lists, watch, requests
        registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
        configure_kopf(settings, settings.execution.executor, _no_server)

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            return session.build_credentials()

        @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
        async def seen(event: kopf.RawEvent, **_: Any) -> None:
            receive_job_event(event, lists.cache, self.requests.append)

        self.kopf = asyncio.ensure_future(
            kopf.operator(
                registry=registry,
                settings=settings,
                clusterwide=lists.namespace is None,
                namespaces=[] if lists.namespace is None else [lists.namespace],
            )
        )

    @property
    def names(self) -> set[str]:
        return {key.name for key in self.lists.cache.all_keys()}

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + 60
        while not condition():
            assert not self.kopf.done(), "kopf has ended"
            assert asyncio.get_running_loop().time() < deadline, (self.server.calls[-10:], self.names)
            await asyncio.sleep(0.01)

    def begun_at(self) -> list[str]:
        """From which version each watch so far went on."""
        return [asked.query["resourceVersion"] for asked in self.server.requests if "watch" in asked.query]

    def lists_made(self) -> int:
        return sum(str(asked) == LIST and "watch" not in asked.query for asked in self.server.requests)


async def _no_server(_: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
    await asyncio.Event().wait()
    yield kopf.WebhookClientConfig()


@asynccontextmanager
async def watched(
    *, lists: list[Answer], watch: list[Answer], namespace: str | None = None, **discovery: list[Answer]
) -> AsyncIterator[Watched]:
    async with serve_stand_in() as (server, api):
        server.serve_jobs()
        server.set_answers("GET /apis", *discovery.get("groups", [api_groups()]))
        server.set_answers(f"GET /apis/{API}", *discovery.get("resources", [api_resources(PLURAL)]))
        path = LIST if namespace is None else LIST.replace(PLURAL, f"namespaces/{namespace}/{PLURAL}")
        server.set_answers(path, *lists)
        # When all is said, a watch stays open.
        server.set_answers(f"{path}?watch", *watch, (-1, ""))
        places = LiveLists(api, Cache(), namespace, GangApis(api))
        requests = list[JobKey]()
        kept = JobWatch(places, requests.append)
        story = Watched(server, places, KopfSession(api, [kept], server.metrics), kept, requests)
        try:
            yield story
        finally:
            story.kopf.cancel()
            await asyncio.wait({story.kopf})


def played(story: Callable[[Watched], Any], **answers: Any) -> None:
    async def play() -> None:
        async with watched(**answers) as seen:
            await story(seen)

    asyncio.run(play())


# --- events ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "requests", "known"),
    [
        pytest.param([(None, make_job_body(1))], 1, 1, id="a job is listed"),
        pytest.param([("ADDED", make_job_body(1))], 1, 1, id="a job came"),
        pytest.param([("ADDED", make_job_body(1)), ("MODIFIED", make_job_body(2))], 2, 1, id="a job changed"),
        pytest.param([("ADDED", make_job_body(1)), ("DELETED", make_job_body(2))], 2, 0, id="a job went"),
        pytest.param([("MODIFIED", make_job_body(2)), ("ADDED", make_job_body(1))], 1, 1, id="old news"),
    ],
)
def test_every_event_reaches_the_cache_and_asks_for_a_look(story: list[Any], requests: int, known: int) -> None:
    cache, requested = Cache(), list[JobKey]()
    for kind, raw in story:
        receive_job_event(kopf.RawEvent(type=kind, object=raw), cache, requested.append)
    assert requested == [JobKey("default", "a")] * requests
    assert len(cache.all_jobs()) == known


# --- the watch ------------------------------------------------------------------------------------------------------


def test_a_watch_begins_with_a_list_and_goes_on_from_its_version() -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: seen.names == {"b"})
        assert seen.watch.listed.is_set()
        await seen.until(lambda: len(seen.begun_at()) == 2)
        assert seen.begun_at() == ["10", "13"]
        assert seen.lists_made() == 1

    played(
        story,
        lists=[jobs(make_job_body(4), version="10")],
        watch=[events(("ADDED", make_job_body(12, "b")), ("DELETED", make_job_body(13)))],
    )


def test_a_bookmark_moves_the_version_from_which_a_watch_goes_on() -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: seen.begun_at() == ["10", "500"])

    played(story, lists=[jobs(version="10")], watch=[events(bookmark(500))])


def test_a_list_in_pages_is_whole_only_with_its_last_page() -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: seen.names == {"a", "b"})
        assert seen.lists_made() == 2

    played(
        story,
        lists=[jobs(make_job_body(1), version="10", more="token"), jobs(make_job_body(2, "b"), version="10")],
        watch=[],
    )


EXPIRED_LINE = events(("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}))


@pytest.mark.parametrize(
    "expired",
    [
        pytest.param(EXPIRED_LINE, id="said in the stream"),
        pytest.param(refusal_answer(410, "Expired"), id="said at once"),
    ],
)
def test_after_an_expired_watch_what_vanished_unseen_is_gone_and_looked_at(expired: Answer) -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: seen.names == {"b", "c"})
        await seen.until(lambda: seen.begun_at() == ["10", "20"])
        assert {"a", "b"} <= {key.name for key in seen.requests}

    played(
        story,
        lists=[
            jobs(make_job_body(1), make_job_body(2, "b"), version="10"),
            jobs(make_job_body(2, "b"), make_job_body(15, "c"), version="20"),
        ],
        watch=[expired],
    )


def test_an_event_that_waited_in_kopf_brings_no_job_back_that_a_list_has_shown_to_be_gone() -> None:
    cache = Cache()
    lists = LiveLists(None, cache, None, GangApis(None))  # type: ignore[arg-type]
    cache.record_object(Kind.JOB, make_job_body(5))
    lists.replace_cached(Kind.JOB, [make_job_body(15, "b")], 20)
    receive_job_event(kopf.RawEvent(type="MODIFIED", object=make_job_body(12)), cache, lambda _: None)  # type: ignore[typeddict-item]
    assert {key.name for key in cache.all_keys()} == {"b"}
    receive_job_event(kopf.RawEvent(type="ADDED", object=make_job_body(21, uid="another")), cache, lambda _: None)  # type: ignore[typeddict-item]
    assert {key.name for key in cache.all_keys()} == {"a", "b"}


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(refusal_answer(500, "InternalError"), id="a broken API server"),
        pytest.param(refusal_answer(429, "TooManyRequests"), id="too many requests"),
        pytest.param(refusal_answer(401, "Unauthorized"), id="a token that is being renewed"),
        pytest.param(refusal_answer(403, "Forbidden"), id="no right any more"),
        pytest.param(refusal_answer(404, "NotFound"), id="no CRD any more"),
        pytest.param(events(("ERROR", {"code": 500, "message": "etcd is away"})), id="an error in the stream"),
        pytest.param(events(("ERROR", {"code": 403, "message": "no"})), id="a refusal in the stream"),
        pytest.param((200, '{"type": "ADDED", "obj'), id="cut off in the middle of a line"),
        pytest.param((200, "<html>\n"), id="a line of something else"),
        pytest.param((200, "{}\n"), id="an event that is none"),
        pytest.param((200, "[]\n"), id="JSON that is no event"),
        pytest.param((200, '{"type": "ADDED", "object": {}}\n'), id="an object that is none"),
        pytest.param((200, '{"type": "ERROR", "object": null}\n'), id="an error without a word"),
        pytest.param((200, ""), id="ended at once"),
        pytest.param(events(("SOMETHING", make_job_body(10))), id="an event of a later Kubernetes"),
    ],
)
def test_a_watch_that_breaks_goes_on_where_it_was(trouble: Answer) -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: seen.names == {"a", "b"})
        assert seen.begun_at()[:3] == ["10", "10", "10"]
        assert seen.lists_made() == 1

    played(
        story,
        lists=[jobs(make_job_body(1), version="10")],
        watch=[trouble, trouble, events(("ADDED", make_job_body(11, "b")))],
    )


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(refusal_answer(503, "ServiceUnavailable"), id="no API server"),
        pytest.param(refusal_answer(429, "TooManyRequests"), id="too many requests"),
        pytest.param(refusal_answer(401, "Unauthorized"), id="a token that is being renewed"),
        pytest.param(refusal_answer(403, "Forbidden"), id="no right yet"),
        pytest.param(refusal_answer(404, "NotFound"), id="no CRD yet"),
        pytest.param(refusal_answer(410, "Expired"), id="a page that is too old"),
        pytest.param((200, "<html>"), id="something else"),
        pytest.param((200, "{}"), id="no list"),
    ],
)
def test_a_list_is_tried_until_it_works(trouble: Answer) -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: seen.names == {"a"})
        assert seen.lists_made() == 3

    played(story, lists=[trouble, trouble, jobs(make_job_body(1))], watch=[])


def test_a_watch_that_ends_at_once_again_and_again_is_not_begun_without_pauses() -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: len(seen.begun_at()) == 1)
        await asyncio.sleep(1.0)
        # 0.05 + 0.1 + 0.2 + 0.4 seconds at least.
        assert len(seen.begun_at()) <= 5

    played(story, lists=[jobs(version="10")], watch=[(200, "")] * 100)


def test_every_job_is_looked_at_after_a_list() -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: {key.name for key in seen.requests} == {"a", "b"})

    played(story, lists=[jobs(make_job_body(1), make_job_body(2, "b"))], watch=[])


def test_an_event_of_a_megabyte_is_read_whole() -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: seen.names == {"b", "c"})

    large = make_job_body(11, "b") | {"status": {"message": "x" * 1_000_000}}
    played(story, lists=[jobs(version="10")], watch=[events(("ADDED", large), ("ADDED", make_job_body(12, "c")))])


def test_of_an_operator_for_one_namespace_only_that_namespace_is_watched() -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: seen.names == {"a"} and len(seen.begun_at()) == 1)
        collections = {asked.path for asked in seen.server.requests if asked.path.endswith(PLURAL)}
        assert collections == {f"/apis/{API}/namespaces/default/{PLURAL}"}

    played(story, lists=[jobs(make_job_body(1))], watch=[], namespace="default")


# --- before there are jobs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "discovery",
    [
        pytest.param({"groups": [api_groups("apps"), api_groups("apps"), api_groups()]}, id="no such group yet"),
        pytest.param({"resources": [api_resources("others"), api_resources(PLURAL)]}, id="no such resource yet"),
        pytest.param({"resources": [refusal_answer(404, "NotFound"), api_resources(PLURAL)]}, id="no such version yet"),
        pytest.param({"groups": [refusal_answer(503, "ServiceUnavailable"), api_groups()]}, id="no API server yet"),
        pytest.param({"groups": [refusal_answer(401, "Unauthorized"), api_groups()]}, id="not known yet"),
        pytest.param({"groups": [(200, "<html>"), api_groups()]}, id="something else answers"),
    ],
)
def test_jobs_are_watched_as_soon_as_they_are_api_groups(discovery: dict[str, list[Answer]]) -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: seen.names == {"a"})

    played(story, lists=[jobs(make_job_body(1))], watch=[], **discovery)


# --- alive ----------------------------------------------------------------------------------------------------------


def test_a_watch_is_dead_when_kopf_asks_nothing_for_longer_than_it_ever_waits() -> None:
    now = [1000.0]
    watch = JobWatch(None, lambda _: None, clock=lambda: now[0])  # type: ignore[arg-type]
    verdicts = []
    for seconds in (0.0, DEAD_SECONDS, 1.0):
        now[0] += seconds
        verdicts.append(watch.is_dead)
    watch.touch()
    assert [*verdicts, watch.is_dead] == [False, False, True, False]


@pytest.mark.parametrize("trouble", [refusal_answer(503, "ServiceUnavailable"), (200, "")])
def test_a_watch_that_fails_without_end_is_alive(trouble: Answer) -> None:
    async def story(seen: Watched) -> None:
        await seen.until(lambda: len(seen.begun_at()) >= 2)
        before = len(seen.begun_at())
        seen.watch.clock = lambda: 1e9
        await seen.until(lambda: len(seen.begun_at()) > before)
        assert not seen.watch.is_dead

    played(story, lists=[jobs(version="10")], watch=[trouble] * 100)
