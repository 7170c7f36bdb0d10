"""Lists make the cache hold what there is."""

from __future__ import annotations

import asyncio
from typing import Any

from moejob_api.contract.pods import Label
from moejob_operator.actions import Kind
from moejob_operator.children.gangs import GangApi
from moejob_operator.cluster import JobKey, Raw
from moejob_operator.kube_api.cache import CHILD_KINDS, Cache
from moejob_operator.kube_api.live_lists import GangApis, LiveLists, collection_path
from stand_in_api import StandInServer, list_answer, refusal_answer, serve_stand_in, stored_object

JOBS = "/apis/moejob.dev/v1alpha1/moetrainingjobs"
KEY, OTHER = JobKey("default", "job"), JobKey("default", "other")


def pod(name: str, version: int, job: str = "job", **metadata: Any) -> dict[str, Any]:
    return stored_object("Pod", name, version, labels={Label.JOB.value: job}, metadata=metadata)


def everything(
    server: StandInServer, *, jobs: tuple[Raw, ...] = (), pods: tuple[Raw, ...] = (), version: str = "100"
) -> None:
    for kind, items in ((Kind.JOB, jobs), (Kind.POD, pods), (Kind.SERVICE, ()), (Kind.CLAIM, ())):
        for namespace in (None, "default"):
            api = "moejob.dev/v1alpha1" if kind is Kind.JOB else "v1"
            said = list_answer(*items, kind=f"{kind}List", api=api, version=version)
            server.set_answers(f"GET {collection_path(kind, namespace)}", said)


def names(cache: Cache, key: JobKey = KEY) -> set[str]:
    return {found["metadata"]["name"] for found in cache.find_children(key).pods}


def test_filling_takes_in_what_is_there_and_drops_what_is_not() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            everything(
                server, jobs=(stored_object("MoETrainingJob", "job", 3),), pods=(pod("a", 4), pod("b", 5, "other"))
            )
            cache = Cache()
            cache.record_object(Kind.JOB, stored_object("MoETrainingJob", "deleted", 1))
            cache.record_object(Kind.POD, pod("vanished", 2))
            lists = LiveLists(api, cache, None, GangApis(api))
            for kind in (Kind.JOB, *CHILD_KINDS):
                await lists.fill_cache(kind)
            assert [job["metadata"]["name"] for job in cache.all_jobs()] == ["job"]
            assert names(cache) == {"a"}
            assert set(cache.all_keys()) == {KEY, OTHER}
            by_path = {asked.path: asked for asked in server.requests}
            assert by_path["/api/v1/pods"].query["labelSelector"] == "app.kubernetes.io/managed-by=moejob"
            assert "labelSelector" not in by_path[JOBS].query

    asyncio.run(story())


def test_an_operator_of_one_namespace_lists_that_one() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            everything(server)
            await LiveLists(api, Cache(), "default", GangApis(api)).fill_cache(Kind.POD)
            assert server.calls == ["GET /api/v1/namespaces/default/pods"]

    asyncio.run(story())


def test_a_gang_scheduler_that_was_just_uninstalled_has_no_pod_groups() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(
                f"GET {collection_path(Kind.POD_GROUP, None, GangApi.NATIVE)}",
                list_answer(
                    stored_object("PodGroup", "job", 3, labels={Label.JOB.value: "job"}),
                    kind="PodGroupList",
                    api=GangApi.NATIVE,
                    version="100",
                ),
            )
            server.set_answers(
                f"GET {collection_path(Kind.POD_GROUP, None, GangApi.VOLCANO)}", refusal_answer(404, "NotFound")
            )
            cache = Cache()
            lists = LiveLists(api, cache, None, GangApis(api, frozenset({GangApi.NATIVE, GangApi.VOLCANO})))
            assert await lists.fill_cache(Kind.POD_GROUP) == 100
            assert len(cache.find_children(KEY).pod_groups) == 1

    asyncio.run(story())


def test_what_is_in_another_namespace_is_not_missed_in_this_one() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            everything(server)
            cache = Cache()
            cache.record_object(Kind.JOB, stored_object("MoETrainingJob", "vanished"))
            cache.record_object(Kind.JOB, stored_object("MoETrainingJob", "job", metadata={"namespace": "elsewhere"}))
            await LiveLists(api, cache, "default", GangApis(api)).fill_cache(Kind.JOB)
            assert cache.all_keys() == [JobKey("elsewhere", "job")]

    asyncio.run(story())


def test_the_version_of_a_list_is_where_a_watch_begins() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            everything(server, version="1234")
            assert await LiveLists(api, Cache(), None, GangApis(api)).fill_cache(Kind.POD) == 1234

    asyncio.run(story())


def test_of_several_lists_the_oldest_says_what_is_gone() -> None:
    """Objects seen after the first list and missing in the second may be of the first kind."""

    async def story() -> None:
        async with serve_stand_in() as (server, api):
            for gang, version in ((GangApi.NATIVE, "10"), (GangApi.VOLCANO, "30")):
                server.set_answers(
                    f"GET {collection_path(Kind.POD_GROUP, None, gang)}",
                    list_answer(kind="PodGroupList", version=version),
                )
            cache = Cache()
            cache.record_object(
                Kind.POD_GROUP, stored_object("PodGroup", "created between", 20, labels={Label.JOB.value: "job"})
            )
            lists = LiveLists(api, cache, None, GangApis(api, frozenset({GangApi.NATIVE, GangApi.VOLCANO})))
            assert await lists.fill_cache(Kind.POD_GROUP) == 10
            assert len(cache.find_children(KEY).pod_groups) == 1

    asyncio.run(story())


def test_without_gang_schedulers_there_is_nothing_to_list() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            await LiveLists(api, Cache(), None, GangApis(api)).fill_cache(Kind.POD_GROUP)
            assert server.requests == []

    asyncio.run(story())


# --- gang schedulers ------------------------------------------------------------------------------------------------


def groups(*versions: str) -> tuple[int, Any]:
    return 200, {
        "groups": [
            {"name": version.partition("/")[0], "versions": [{"groupVersion": version}]} for version in versions
        ]
    }  # fmt: skip


NATIVE = "GET /apis/scheduling.k8s.io/v1alpha2"


def test_gang_schedulers_are_those_whose_api_is_served() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            found = GangApis(api)
            server.set_answers("GET /apis", groups("apps/v1", "scheduling.k8s.io/v1"))
            await found.refresh()
            assert found.served_apis == frozenset()
            assert server.calls == ["GET /apis"]

            server.set_answers(
                "GET /apis",
                groups("scheduling.k8s.io/v1alpha2", "scheduling.volcano.sh/v1beta1", "kueue.x-k8s.io/v1beta2"),
            )
            server.set_answers(NATIVE, (200, {"resources": [{"name": "podgroups"}, {"name": "podgroups/status"}]}))
            server.set_answers("GET /apis/scheduling.volcano.sh/v1beta1", refusal_answer(404, "NotFound"))
            await found.refresh()
            assert found.served_apis == {GangApi.NATIVE, GangApi.KUEUE}
            assert [*found.apis_with_objects] == [GangApi.NATIVE]

            server.set_answers(NATIVE, (200, {"resources": [{"name": "workloads"}]}))
            await found.refresh()
            assert [*found.apis_with_objects] == []

    asyncio.run(story())
