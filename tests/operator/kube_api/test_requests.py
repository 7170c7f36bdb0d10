"""Requests that a job costs the API server, over a stand-in that counts them."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime

from builders import SFT, merge_sections
from fake_world import IMAGES, SMALL
from moejob_operator.actions import Kind
from moejob_operator.children.attempt import JobNetwork
from moejob_operator.cluster import JobKey
from moejob_operator.kube_api.api_server import ApiServer
from moejob_operator.kube_api.cache import Cache
from moejob_operator.kube_api.live_lists import JOBS, GangApis, LiveLists
from moejob_operator.kube_api.pod_client import PodClient
from moejob_operator.planning.observed_state import OperatorSetting
from moejob_operator.reconcile import Reconciler, reconcile_job
from moejob_operator.validation import Validator
from stand_in_api import StandInServer, list_answer, serve_stand_in, stored_object

KEY = JobKey("default", "job")
CORE, NAMESPACE = "/api/v1/namespaces/default", "/namespaces/default"
POLICIES = f"/apis/networking.k8s.io/v1{NAMESPACE}/networkpolicies"
STATUS = f"/apis/moejob.dev/v1alpha1{NAMESPACE}/moetrainingjobs/job/status"
CREATED = {name: f"POST {CORE}/{name}" for name in ("services", "persistentvolumeclaims", "secrets", "pods")}


def cluster(server: StandInServer, lists: LiveLists, cache: Cache) -> ApiServer:
    for call in (*CREATED.values(), f"POST {POLICIES}", f"POST /apis/events.k8s.io/v1{NAMESPACE}/events"):
        server.set_answers(call, (201, None))
    server.set_answers(f"PUT {STATUS}", (200, None))
    return ApiServer(
        api=lists.api,
        cache=cache,
        lists=lists,
        pods=PodClient(0.5),
        identity="replica-1",
        remaining_seconds=lambda: 10.0,
        on_status_written=lambda *_: None,
    )


def list_all(server: StandInServer, cache: Cache) -> None:
    """Live lists show what the cache holds."""
    there, version = cache.find_children(KEY), str(server.versions)
    for name, items in (("pods", there.pods), ("services", there.services), ("persistentvolumeclaims", there.claims)):
        server.set_answers(f"GET {CORE}/{name}", list_answer(*items, version=version))


def test_a_job_of_two_pods_asks_for_its_secret_and_policy_once_however_often_a_pod_is_replaced() -> None:
    async def story() -> Counter[str]:
        async with serve_stand_in() as (server, api):
            cache = Cache()
            here = cluster(server, LiveLists(api, cache, None, GangApis(api)), cache)
            cache.record_object(
                Kind.JOB, stored_object("MoETrainingJob", "job", spec=merge_sections(SFT, SMALL)) | {"apiVersion": JOBS}
            )
            setting = OperatorSetting(IMAGES, network=JobNetwork("moejob-system"))
            reconciler = Reconciler(Validator(), setting, lambda: datetime.now(UTC))
            await reconcile_job(KEY, here, reconciler)
            for _ in range(2):
                cache.record_deletion(
                    Kind.POD, max(cache.find_children(KEY).pods, key=lambda pod: pod["metadata"]["name"])
                )
                list_all(server, cache)
                # One charges it, another creates the next.
                await reconcile_job(KEY, here, reconciler)
                await reconcile_job(KEY, here, reconciler)
            return Counter(server.calls)

    asked = asyncio.run(story())
    assert {name: asked[call] for name, call in CREATED.items()} | {"networkpolicies": asked[f"POST {POLICIES}"]} == {
        "services": 1,
        "persistentvolumeclaims": 1,
        "secrets": 1,
        "networkpolicies": 1,
        "pods": 4,
    }
