"""The same stories as with FakeCluster, run on a real API server: they end alike in both worlds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from builders import merge_sections
from cluster.control_plane.api import RefusedError
from cluster.control_plane.gang_watch import GangWatch, gang_watch
from cluster.control_plane.jobs import path as job_path
from cluster.control_plane.operators import ACCOUNT, installed
from cluster.control_plane.plane import ControlPlane
from cluster.control_plane.pod_voices import PodVoices, pod_voices
from cluster.control_plane.real_cluster import RealCluster, add_node, send_heartbeat
from cluster.extent import in_full
from cluster.waiting import until
from fake_world import KEY, SMALL, World
from moejob_api.job.status import ConditionType
from moejob_client.api_client import ApiClient
from moejob_operator.children.gangs import GangApi
from moejob_operator.cluster import JobKey
from moejob_operator.kube_api.account import load_account
from moejob_operator.runtime.metrics import Metrics
from scenarios import SCENARIOS, Scenario, play_scenario

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("definition")]

HOME = "moejob-scenarios"
NODES = tuple(f"node-{role}-{index}" for role, count in (("trainer", 4), ("rollout", 2)) for index in range(count))
# Only the tests schedule.
BY_HAND = merge_sections(SMALL, {"resources": {"schedulerName": "played-by-hand"}})
# A claim that is bound stays bound for the real volume controller; its own test below has one that is not bound yet.
NOT_HERE = {"a claim without a volume is told"}
STORIES = tuple(found for found in SCENARIOS if found.id not in NOT_HERE)
NewWorld = Callable[[Scenario], World]


def one_of(count: int, first: int = 0) -> pytest.MarkDecorator:
    """One of every `count` stories; test-faults tells all, and FakeCluster all with a crash after each change."""
    told = [
        pytest.param(found, id=found.id, marks=() if number % count == first else in_full)
        for number, found in enumerate(STORIES)
    ]
    return pytest.mark.parametrize("scenario", told)


def test_what_is_not_told_here_is_in_the_table() -> None:
    assert {found.id for found in SCENARIOS} >= NOT_HERE


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture(scope="module")
def api(
    control_plane: ControlPlane, loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiClient]:
    """The operator's client, with the rights of its service account."""
    control_plane.api.create("/api/v1/namespaces", {"metadata": {"name": HOME}})
    until(lambda: control_plane.has_service_account(HOME), waiting_for=f"a service account in {HOME}")
    with installed(control_plane, HOME, tmp_path_factory.mktemp("operator")):
        kubeconfig = control_plane.service_account_kubeconfig(HOME, ACCOUNT)
        client = loop.run_until_complete(_client(kubeconfig))
        yield client
        loop.run_until_complete(client.close())
    control_plane.api.delete(f"/api/v1/namespaces/{HOME}")


async def _client(kubeconfig: Path) -> ApiClient:
    return ApiClient(await load_account(kubeconfig), Metrics(), concurrency=32, seconds=10)


@pytest.fixture(scope="module")
def voices() -> Iterator[PodVoices]:
    with pod_voices() as found:
        yield found


@pytest.fixture(scope="module")
def witness(control_plane: ControlPlane) -> Iterator[GangWatch]:
    with gang_watch(control_plane) as watch:
        yield watch


@pytest.fixture(scope="module")
def nodes(control_plane: ControlPlane) -> Iterator[tuple[str, ...]]:
    for name in NODES:
        add_node(control_plane, name)
    yield NODES
    for name in NODES:
        control_plane.api.delete(f"/api/v1/nodes/{name}")


@pytest.fixture
def new_world(
    control_plane: ControlPlane,
    namespace: str,
    api: ApiClient,
    voices: PodVoices,
    loop: asyncio.AbstractEventLoop,
    nodes: tuple[str, ...],
) -> Iterator[NewWorld]:
    """Makes the one world of a test: a namespace with a job called `job`."""
    for name in nodes:
        send_heartbeat(control_plane, name)
    cluster = RealCluster(plane=control_plane, namespace=namespace, api=api, voices=voices, loop=loop)

    def made(scenario: Scenario) -> World:
        apis = frozenset(GangApi(found) for found in scenario.apis)
        return World(cluster=cluster, key=JobKey(namespace, KEY.name), small=BY_HAND, gang_apis=apis)

    yield made
    for name in cluster.lost:
        add_node(control_plane, name)
    _let_go(cluster)


def _let_go(cluster: RealCluster) -> None:
    """Nothing holds the job, its pods or its volumes any more."""
    job = job_path(cluster.namespace, KEY.name)
    pods = [f"/api/v1/namespaces/{cluster.namespace}/pods/{pod['metadata']['name']}" for pod in cluster.pods()]
    volumes = cluster.plane.api.get("/api/v1/persistentvolumes")["items"]
    with suppress(RefusedError):
        cluster.plane.api.merge(job, {"metadata": {"finalizers": None}})
        cluster.plane.api.delete(job)
    for kind, name in list(cluster.profiles):
        cluster.delete_profile(kind, name)
    # Others clear away at the same time.
    for path in (f"{pod}?gracePeriodSeconds=0" for pod in pods):
        with suppress(RefusedError):
            cluster.plane.api.delete(path)
    for volume in volumes:
        with suppress(RefusedError):
            cluster.plane.api.delete(f"/api/v1/persistentvolumes/{volume['metadata']['name']}")


@cache
def imagined(title: str) -> World:
    """The same story with FakeCluster."""
    [scenario] = (found for found in STORIES if found.id == title)
    return play_scenario(scenario, World(gang_apis=frozenset(GangApi(found) for found in scenario.apis)))


@one_of(2)
def test_a_job_lives_as_it_does_in_the_fake_cluster_and_rests(
    scenario: Scenario, new_world: NewWorld, witness: GangWatch
) -> None:
    world = play_scenario(scenario, new_world(scenario))
    assert world.fixed_point() == imagined(scenario.id).fixed_point()
    assert witness.doubled == []
    # A clock that was put forward makes a new pod old at once: the reason in the status follows what was made last.
    world.reconcile()
    already = audited(world)
    for _ in range(3):
        world.reconcile()
    assert writes(world, already) == []


# Other ones than those that live without a crash.
@one_of(4, first=1)
def test_a_crash_in_the_middle_leads_to_the_same_end(
    scenario: Scenario, new_world: NewWorld, witness: GangWatch
) -> None:
    whole = imagined(scenario.id)
    world = new_world(scenario)
    world.cluster.crash_at = random.Random(scenario.id).randrange(whole.cluster.halves)
    play_scenario(scenario, world)
    assert world.crashes == 1
    assert world.fixed_point() == whole.fixed_point()
    assert witness.doubled == []


def test_a_claim_without_a_volume_is_told_until_the_volume_controller_has_bound_it(new_world: NewWorld) -> None:
    world = new_world(SCENARIOS[0])
    assert isinstance(world.cluster, RealCluster)
    world.cluster.has_volumes = False
    world.apply()
    world.settle()
    # Of a claim that stays as it was created no watch tells the operator: the scheduler does.
    world.hold_pod(
        0, condition={"reason": "Unschedulable", "message": "pod has unbound immediate PersistentVolumeClaims"}
    )
    world.settle()
    assert (world.pod_names(), world.condition(ConditionType.RUNNING)) == (["0-0", "0-1"], "False ClaimPending")
    world.cluster.has_volumes = True
    world.settle()
    assert world.condition(ConditionType.RUNNING) == "False Starting"


def audited(world: World) -> int:
    """Return how long the audit log is."""
    assert isinstance(world.cluster, RealCluster)
    return world.cluster.plane.audit_log.stat().st_size


def writes(world: World, since: int) -> list[str]:
    """Return what the operator has written in this world's namespace since then."""
    assert isinstance(world.cluster, RealCluster)
    lines = world.cluster.plane.audited(since)
    assert lines, "the looks at least were to be seen"
    return [
        f"{line['verb']} {line['requestURI']}"
        for line in lines
        if line["user"]["username"] == f"system:serviceaccount:{HOME}:{ACCOUNT}"
        and f"/namespaces/{world.key.namespace}/" in line["requestURI"]
        and line["verb"] not in ("get", "list", "watch")
    ]
