"""The cluster as a reconcile sees it, over an API server with given answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from moejob_api.contract.pods import Label
from moejob_operator.actions import Event, Kind, ObjectReference, Severity
from moejob_operator.children.gangs import GangApi
from moejob_operator.cluster import Conflict, Forbidden, JobKey, Retryable
from moejob_operator.kube_api.api_server import ApiServer
from moejob_operator.kube_api.cache import Cache
from moejob_operator.kube_api.live_lists import GangApis, LiveLists
from moejob_operator.kube_api.pod_client import PodClient
from stand_in_api import Answer, StandInServer, list_answer, refusal_answer, serve_stand_in, stored_object

KEY = JobKey("default", "job")
LABELS = {Label.JOB.value: "job", Label.JOB_UID.value: "uid-job"}
JOBS = "/apis/moejob.dev/v1alpha1/namespaces/default/moetrainingjobs"
PODS = "/api/v1/namespaces/default/pods"
SECRETS = "/api/v1/namespaces/default/secrets"
GROUPS = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups"
PAST = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
FUTURE = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class World:
    """A cluster, and what it is made of."""

    server: StandInServer
    cluster: ApiServer
    cache: Cache
    remaining: float = 10.0
    written: list[tuple[Any, Any]] = field(default_factory=list)


@asynccontextmanager
async def world(*gangs: GangApi, progress_seconds: float = 0.5) -> AsyncIterator[World]:
    async with serve_stand_in() as (server, api):
        cache = Cache()
        cluster = ApiServer(
            api=api,
            cache=cache,
            lists=LiveLists(api, cache, None, GangApis(api, frozenset(gangs))),
            pods=PodClient(progress_seconds),
            identity="replica-1",
            remaining_seconds=lambda: here.remaining,
            on_status_written=lambda before, after: here.written.append((before, after)),
        )
        here = World(server, cluster, cache)
        yield here


def played(story: Callable[[World], Coroutine[Any, Any, None]], *gangs: GangApi) -> None:
    async def play() -> None:
        async with world(*gangs) as here:
            await story(here)

    asyncio.run(play())


def make_job_body(version: int = 1, **fields: Any) -> dict[str, Any]:
    return stored_object("MoETrainingJob", "job", version, **fields)


def pod(name: str = "job-trainer-0-00000", version: int = 1, **fields: Any) -> dict[str, Any]:
    return stored_object("Pod", name, version, labels=LABELS, owner="uid-job", **fields)


def list_kinds(server: StandInServer, pods: tuple[int, Any]) -> None:
    server.set_answers(f"GET {PODS}", pods)
    server.set_answers("GET /api/v1/namespaces/default/services", list_answer(kind="ServiceList"))
    server.set_answers(
        "GET /api/v1/namespaces/default/persistentvolumeclaims", list_answer(kind="PersistentVolumeClaimList")
    )


# --- reading --------------------------------------------------------------------------------------------------------


def test_reads_come_from_the_cache_and_cost_no_request() -> None:
    async def story(here: World) -> None:
        here.cache.record_object(Kind.JOB, make_job_body())
        here.cache.record_object(Kind.POD, pod())
        assert await here.cluster.get_job(KEY) == make_job_body()
        assert [found["metadata"]["name"] for found in (await here.cluster.list_children(KEY, live=False)).pods] == [
            "job-trainer-0-00000"
        ]
        assert await here.cluster.get_job(JobKey("default", "none")) is None
        assert here.server.requests == []

    played(story)


def test_a_live_list_shows_what_is_there_and_the_cache_believes_it() -> None:
    async def story(here: World) -> None:
        here.cache.record_object(Kind.POD, pod("ghost"))
        list_kinds(here.server, list_answer(pod("real", 50), version="60"))
        for live in (True, False):
            found = await here.cluster.list_children(KEY, live=live)
            assert [raw["metadata"]["name"] for raw in found.pods] == ["real"]
            assert found.pods[0]["kind"] == "Pod"
        assert {asked.query["labelSelector"] for asked in here.server.requests} == {
            "app.kubernetes.io/managed-by=moejob,moejob.dev/job=job"
        }

    played(story)


def test_pod_groups_are_listed_of_every_gang_scheduler_there_is() -> None:
    async def story(here: World) -> None:
        list_kinds(here.server, list_answer())
        here.server.set_answers(
            f"GET {GROUPS}", list_answer(stored_object("PodGroup", "job", labels=LABELS), kind="PodGroupList")
        )
        volcano = GROUPS.replace("scheduling.k8s.io/v1alpha2", "scheduling.volcano.sh/v1beta1")
        here.server.set_answers(f"GET {volcano}", list_answer(kind="PodGroupList"))
        found = await here.cluster.list_children(KEY, live=True)
        assert [raw["metadata"]["name"] for raw in found.pod_groups] == ["job"]

    played(story, GangApi.NATIVE, GangApi.VOLCANO)


READY = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
TAKEN = {"DisruptionTarget": "True"}
UNHEARD = {"Ready": "False", "ContainersReady": "True"}
SILENT = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}


@pytest.mark.parametrize(
    ("until", "said", "node", "lost"),
    [
        pytest.param(PAST, {}, (200, SILENT), {"node-1"}, id="not heard of"),
        pytest.param(PAST, {}, refusal_answer(404, "NotFound"), {"node-1"}, id="gone"),
        pytest.param(PAST, {}, (200, READY), set(), id="alive: its kubelet is only slow"),
        pytest.param(PAST, {}, refusal_answer(403, "Forbidden"), set(), id="not ours to see"),
        pytest.param(FUTURE, {}, (200, SILENT), set(), id="the pod still has time"),
        pytest.param(FUTURE, TAKEN, (200, SILENT), {"node-1"}, id="the pod is taken away for its node"),
        pytest.param(FUTURE, TAKEN, (200, READY), set(), id="the pod is taken away for a node that is heard of"),
        pytest.param(None, {}, (200, SILENT), set(), id="the pod is not asked to end"),
        pytest.param(None, UNHEARD, (200, SILENT), {"node-1"}, id="the pod is marked for the silence of its node"),
    ],
)
def test_a_node_counts_as_lost_only_when_the_cluster_says_so(
    until: str | None, said: dict[str, str], node: Answer, lost: set[str]
) -> None:
    async def story(here: World) -> None:
        metadata = {} if until is None else {"deletionTimestamp": until}
        reason = "DeletionByTaintManager"
        conditions = [{"type": kind, "status": status, "reason": reason} for kind, status in said.items()]
        here.cache.record_object(
            Kind.POD, pod(spec={"nodeName": "node-1"}, metadata=metadata, status={"conditions": conditions})
        )
        here.server.set_answers("GET /api/v1/nodes/node-1", node)
        assert (await here.cluster.list_children(KEY, live=False)).lost_nodes == lost

    played(story)


# --- creating -------------------------------------------------------------------------------------------------------


def test_what_was_created_is_known_before_the_watch_tells_of_it() -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"POST {PODS}", (201, {"metadata": pod(version=7)["metadata"]}))
        await here.cluster.ensure(pod())
        assert here.server.requests[0].body == pod()
        [seen] = (await here.cluster.list_children(KEY, live=False)).pods
        assert seen["metadata"]["resourceVersion"] == "7"
        assert seen["kind"] == "Pod"

    played(story)


def test_each_secret_gets_a_value_of_its_own_which_is_not_kept_here() -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"POST {SECRETS}", (201, {"metadata": {"name": "job-uid"}}))
        manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": pod()["metadata"], "immutable": True}
        await here.cluster.ensure(manifest)
        await here.cluster.ensure(manifest)
        first, second = (asked.body.pop("stringData")["secret"] for asked in here.server.requests)
        assert len(first) == len(second) == 64
        assert first != second
        assert [asked.body for asked in here.server.requests] == [manifest, manifest]

    played(story)


@pytest.mark.parametrize(
    ("answer", "lacks"),
    [
        pytest.param((201, None), True, id="it could be created"),
        pytest.param(refusal_answer(409, "AlreadyExists"), False, id="there is one"),
        pytest.param(refusal_answer(403, "Forbidden"), False, id="a quota says nothing about it"),
    ],
)
def test_whether_a_secret_is_there_is_asked_by_a_creation_that_changes_nothing(answer: Answer, lacks: bool) -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"POST {SECRETS}", answer)
        manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "job-1", "namespace": "default"}}
        assert await here.cluster.is_missing(manifest) is lacks
        [asked] = here.server.requests
        assert (str(asked), asked.query["dryRun"]) == (f"POST {SECRETS}", "All")
        assert "stringData" not in asked.body

    played(story)


def test_a_secret_that_is_there_is_neither_read_nor_replaced() -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"POST {SECRETS}", refusal_answer(409, "AlreadyExists"))
        await here.cluster.ensure({"apiVersion": "v1", "kind": "Secret", "metadata": pod()["metadata"]})
        assert [str(asked) for asked in here.server.requests] == [f"POST {SECRETS}"]

    played(story)


@pytest.mark.parametrize(
    ("message", "raised"),
    [
        pytest.param('failed calling webhook "mpod.kb.io": connection refused', Forbidden, id="its webhook is down"),
        pytest.param("etcdserver: request timed out", Retryable, id="it is down itself"),
    ],
)
def test_an_internal_error_is_for_the_user_when_it_names_a_webhook(message: str, raised: type[Exception]) -> None:
    async def story(here: World) -> None:
        answer = {"kind": "Status", "reason": "InternalError", "message": f"Internal error occurred: {message}"}
        here.server.set_answers(f"POST {PODS}", (500, answer))
        with pytest.raises(raised):
            await here.cluster.ensure(pod())

    played(story)


@pytest.mark.parametrize(
    ("there", "raised"),
    [
        pytest.param((200, pod(status={"phase": "Running"})), None, id="ours"),
        pytest.param(
            (200, stored_object("Pod", "job-trainer-0-00000", owner="uid-of-an-older-job")), Forbidden, id="another's"
        ),
        pytest.param((200, stored_object("Pod", "job-trainer-0-00000")), Forbidden, id="nobody's"),
        pytest.param(refusal_answer(404, "NotFound"), Retryable, id="gone meanwhile"),
    ],
)
def test_one_that_is_there_counts_when_the_same_job_owns_it(there: Answer, raised: type[Exception] | None) -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"POST {PODS}", refusal_answer(409, "AlreadyExists"))
        here.server.set_answers(f"GET {PODS}/job-trainer-0-00000", there)
        if raised is None:
            await here.cluster.ensure(pod())
            [seen] = (await here.cluster.list_children(KEY, live=False)).pods
            assert seen["status"] == {"phase": "Running"}
            return
        with pytest.raises(raised):
            await here.cluster.ensure(pod())

    played(story)


@pytest.mark.parametrize(
    ("answer", "raised", "says"),
    [
        pytest.param(refusal_answer(403, "Forbidden", "exceeded quota"), Forbidden, "exceeded quota", id="quota"),
        pytest.param(refusal_answer(422, "Invalid", "bad name"), Forbidden, "bad name", id="invalid"),
        pytest.param(refusal_answer(409, "Conflict"), Retryable, "", id="two at once used the same quota"),
        pytest.param((404, "404 page not found"), Forbidden, "cannot be created", id="no such API"),
        pytest.param(refusal_answer(429, "TooManyRequests"), Retryable, "", id="too many requests"),
    ],
)
def test_a_refused_creation_says_whether_it_may_work_later(answer: Answer, raised: type[Exception], says: str) -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"POST {GROUPS}", answer)
        group = stored_object("PodGroup", "job", labels=LABELS) | {"apiVersion": GangApi.NATIVE.value}
        with pytest.raises(raised, match=says):
            await here.cluster.ensure(group)

    played(story)


# --- deleting -------------------------------------------------------------------------------------------------------

REF = ObjectReference(Kind.POD, "default", "job-trainer-0-00000", "uid-job-trainer-0-00000")


@pytest.mark.parametrize(
    "grace",
    [
        pytest.param(None, id="gently"),
        pytest.param(5, id="soon"),
        pytest.param(0, id="without its kubelet"),
    ],
)
def test_a_deletion_names_the_uid(grace: int | None) -> None:
    async def story(here: World) -> None:
        here.cache.record_object(Kind.POD, pod(status={"phase": "Running"}, metadata={"deletionTimestamp": None}))
        ending = {
            "kind": "PartialObjectMetadata",
            "metadata": pod(version=9, metadata={"deletionTimestamp": FUTURE})["metadata"],
        }
        here.server.set_answers(f"DELETE {PODS}/{REF.name}", (200, ending))
        await here.cluster.delete(REF, grace_seconds=grace)
        [asked] = here.server.requests
        assert asked.body["preconditions"] == {"uid": REF.uid}
        assert asked.body.get("gracePeriodSeconds") == grace
        [left] = (await here.cluster.list_children(KEY, live=False)).pods
        assert left["metadata"]["deletionTimestamp"] == FUTURE
        assert left["status"] == {"phase": "Running"}

    played(story)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(refusal_answer(404, "NotFound"), id="gone"),
        pytest.param(
            refusal_answer(409, "Conflict", "the UID in the precondition does not match"), id="replaced by another"
        ),
        pytest.param((200, {"kind": "Status", "status": "Success"}), id="gone at once"),
    ],
)
def test_deleting_what_is_not_there_is_fine(answer: Answer) -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"DELETE {PODS}/{REF.name}", answer)
        await here.cluster.delete(REF, grace_seconds=None)
        assert (await here.cluster.list_children(KEY, live=False)).pods == ()

    played(story)


def test_a_pod_that_somebody_else_took_away_at_the_same_moment_is_left_to_the_watch() -> None:
    async def story(here: World) -> None:
        here.cache.record_object(Kind.POD, pod(status={"phase": "Failed"}))
        # The API server then answers with the object as it was about to be written: without a version.
        answer = pod(metadata={"deletionTimestamp": FUTURE})["metadata"]
        del answer["resourceVersion"]
        here.server.set_answers(
            f"DELETE {PODS}/{REF.name}", (200, {"kind": "PartialObjectMetadata", "metadata": answer})
        )
        await here.cluster.delete(REF, grace_seconds=None)
        [left] = (await here.cluster.list_children(KEY, live=False)).pods
        assert left["status"] == {"phase": "Failed"}

    played(story)


def test_a_pod_group_is_deleted_where_it_is() -> None:
    async def story(here: World) -> None:
        ref = ObjectReference(Kind.POD_GROUP, "default", "job", "uid-job")
        here.server.set_answers(f"DELETE {GROUPS}/job", (200, {"kind": "Status"}))
        await here.cluster.delete(ref, grace_seconds=None)
        assert len(here.server.requests) == 2, "not known where: every gang scheduler is asked"
        here.cache.record_object(
            Kind.POD_GROUP, stored_object("PodGroup", "job", labels=LABELS) | {"apiVersion": GangApi.NATIVE.value}
        )
        await here.cluster.delete(ref, grace_seconds=None)
        assert here.server.calls[2:] == [f"DELETE {GROUPS}/job"]

    played(story, GangApi.NATIVE, GangApi.VOLCANO)


# --- the status -----------------------------------------------------------------------------------------------------


def test_a_status_replaces_the_old_one_under_the_version_it_was_read_at() -> None:
    async def story(here: World) -> None:
        before = make_job_body(5, status={"phase": "Pending"}, spec={"method": "SFT"})
        here.cache.record_object(Kind.JOB, before)
        here.server.set_answers(f"PUT {JOBS}/job/status", (200, {"metadata": make_job_body(6)["metadata"]}))
        await here.cluster.write_status(before, {"phase": "Running"})
        [asked] = here.server.requests
        assert asked.body["metadata"] == {
            "name": "job", "namespace": "default", "uid": "uid-job", "resourceVersion": "5",
        }  # fmt: skip
        assert asked.body["status"] == {"phase": "Running"}
        assert here.written == [({"phase": "Pending"}, {"phase": "Running"})]
        seen = await here.cluster.get_job(KEY)
        assert seen is not None
        assert seen == make_job_body(6, status={"phase": "Running"}, spec={"method": "SFT"})

    played(story)


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        pytest.param(refusal_answer(409, "Conflict"), Conflict, id="changed since"),
        pytest.param(refusal_answer(404, "NotFound"), Conflict, id="gone: there is nothing to write to"),
        pytest.param(refusal_answer(422, "Invalid"), Forbidden, id="a status that the schema refuses"),
        pytest.param(refusal_answer(500, "InternalError"), Retryable, id="a broken API server"),
    ],
)
def test_a_status_that_was_not_written_is_told(answer: Answer, raised: type[Exception]) -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"PUT {JOBS}/job/status", answer)
        with pytest.raises(raised):
            await here.cluster.write_status(make_job_body(), {})
        assert here.written == []

    played(story)


def test_who_does_not_lead_any_more_writes_nothing() -> None:
    async def story(here: World) -> None:
        here.remaining = 0.0
        for write in (
            here.cluster.ensure(pod()),
            here.cluster.delete(REF, grace_seconds=0),
            here.cluster.write_status(make_job_body(), {}),
        ):
            with pytest.raises(Retryable, match="does not lead"):
                await write
        assert here.server.requests == []

    played(story)


def test_no_write_is_on_its_way_when_somebody_else_may_lead() -> None:
    async def story(here: World) -> None:
        here.remaining = 0.05
        here.server.answering.clear()
        with pytest.raises(Retryable, match=r"0\.05 s passed"):
            await here.cluster.ensure(pod())

    played(story)


# --- events ---------------------------------------------------------------------------------------------------------

EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"


def test_an_event_is_about_the_job() -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"POST {EVENTS}", (201, {}))
        await here.cluster.post_event(make_job_body(), Event(Severity.WARNING, "GangRestarted", "ü" * 1000))
        [asked] = here.server.requests
        assert asked.body["regarding"]["uid"] == "uid-job"
        assert (asked.body["type"], asked.body["reason"]) == ("Warning", "GangRestarted")
        assert len(asked.body["note"].encode()) <= 1024
        assert set(asked.body["note"]) == {"ü"}
        await here.cluster.post_event(make_job_body(), Event(Severity.NORMAL, "GangRestarted", ""))
        first, second = (asked.body["metadata"]["name"] for asked in here.server.requests)
        assert first != second

    played(story)


def test_events_are_listed_in_the_order_in_which_things_happened() -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"POST {EVENTS}", (201, {}))
        started = datetime(2030, 1, 1, tzinfo=UTC)
        for seconds in (0.0, 0.000001, 9.9, 3600.0):
            cluster = replace(here.cluster, clock=lambda: started + timedelta(seconds=seconds))  # noqa: B023
            await cluster.post_event(make_job_body(), Event(Severity.NORMAL, "Started", ""))
        names = [asked.body["metadata"]["name"] for asked in here.server.requests]
        # The API server lists by name, and kubectl keeps that order.
        assert names == sorted(names)

    played(story)


@pytest.mark.parametrize(
    "answer", [refusal_answer(403, "Forbidden"), refusal_answer(500, "InternalError"), refusal_answer(404, "NotFound")]
)
def test_an_event_that_is_lost_is_no_error(answer: Answer) -> None:
    async def story(here: World) -> None:
        here.server.set_answers(f"POST {EVENTS}", answer)
        await here.cluster.post_event(make_job_body(), Event(Severity.NORMAL, "Started", ""))

    played(story)
