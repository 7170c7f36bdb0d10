"""The Service of a job: its name is no other client's, no pod trusts a foreign one, and upgrades break no gang."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from builders import job
from fake_cluster import Body
from fake_world import World
from moejob_api.contract.pods import Environment, PodRole
from moejob_api.job import MAX_NAME
from moejob_api.job.status import ConditionType, Phase
from moejob_operator.actions import Kind
from moejob_operator.children.attempt import service_name

FORMER, PRESENT = "job", "job-moejob"
ENGINES: dict[str, Any] = {
    "method": "GRPO",
    "grpo": {
        "rewards": [{"name": "math"}],
        "maxNewTokens": 256,
        "promptsPerStep": 2,
        "rollout": {"placement": "Separate", "replicas": 1},
    },
}


def running(**sections: Any) -> World:
    """A job whose pods run."""
    world = World()
    world.apply(**sections)
    world.settle()
    world.run()
    world.settle()
    assert world.status.phase is Phase.RUNNING
    return world


def as_left_by_the_former_version(world: World) -> World:
    """The operator that made these objects named the Service as the job; then this one took over."""
    service = world.cluster.objects.pop((Kind.SERVICE, "team", PRESENT))
    world.cluster.store_changed(service | {"metadata": service["metadata"] | {"name": FORMER, "uid": "uid-of-former"}})
    for pod in list(world.cluster.pods()):
        world.cluster.store_changed(pod | {"spec": json.loads(json.dumps(pod["spec"]).replace(PRESENT, FORMER))})
    world.restart_operator()
    return world


def services(world: World) -> list[str]:
    """Names of all Services."""
    return sorted(name for kind, _, name in world.cluster.objects if kind is Kind.SERVICE)


def subdomains(world: World, role: PodRole = PodRole.TRAINER) -> list[str]:
    """The Services by which pods of a role are found, and the hosts that their environment names."""
    return sorted({name for pod in world.cluster.pods(role) for name in _names(pod)})


def _names(pod: Body) -> Iterator[str]:
    yield pod["spec"]["subdomain"]
    hosts = (Environment.HOST, Environment.RENDEZVOUS_HOST)
    for variable in pod["spec"]["containers"][0]["env"]:
        if variable["name"] in hosts:
            yield variable["value"].split(".")[1]


def foreign(world: World, name: str) -> None:
    """A Service that another client made, with the job's labels and without its controller reference."""
    labels = {"moejob.dev/job": "job", "moejob.dev/job-uid": world.job["metadata"]["uid"]}
    about = {"name": name, "namespace": "team", "labels": labels}
    world.cluster.store_changed(
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": {"ports": [{"port": 6379}]}}
    )


def test_a_job_takes_no_name_that_another_client_looks_up() -> None:
    world = running()
    assert (services(world), subdomains(world)) == ([PRESENT], [PRESENT])


def test_the_service_of_the_longest_name_is_a_dns_label() -> None:
    longest = "a" * MAX_NAME
    assert job(name=longest).metadata.name == longest
    assert len(service_name(longest)) <= 63


def test_a_foreign_service_of_that_name_is_told_with_the_fix_and_no_pod_trusts_it() -> None:
    world = World()
    world.apply()
    foreign(world, PRESENT)
    world.settle()
    assert world.condition(ConditionType.RUNNING) == "False CreationRefused"
    assert f"a Service {PRESENT} is in the way" in world.message(ConditionType.RUNNING)
    assert "delete it" in world.message(ConditionType.RUNNING)
    assert (world.pod_names(), world.cluster.objects[Kind.SERVICE, "team", PRESENT]["spec"]) == (
        [],
        {"ports": [{"port": 6379}]},
    )
    world.cluster.remove_object((Kind.SERVICE, "team", PRESENT))
    world.wait(31)
    world.settle()
    assert world.pod_names() == ["0-0", "0-1"]


def test_a_foreign_service_in_the_place_of_one_that_was_deleted_is_told_while_the_gang_runs() -> None:
    world = running()
    world.cluster.remove_object((Kind.SERVICE, "team", PRESENT))
    foreign(world, PRESENT)
    world.settle()
    assert (world.status.phase, world.pod_names()) == (Phase.RUNNING, ["0-0", "0-1"])
    assert f"a Service {PRESENT} is in the way" in world.message(ConditionType.RUNNING)
    world.end_pod(1, 137)
    world.settle()
    made = world.cluster.log.count("create Pod job-trainer-0-00001")
    assert made == 1, "a pod that takes the place would be found by a Service that is not the job's"


def test_a_service_of_the_jobs_name_is_none_of_its_business() -> None:
    world = World()
    world.apply()
    foreign(world, FORMER)
    world.settle()
    world.run()
    world.settle()
    assert (world.status.phase, subdomains(world)) == (Phase.RUNNING, [PRESENT])


# --- upgrades ---------------------------------------------------------------------------------------------------------


def test_a_gang_of_the_former_version_runs_on_with_its_service_alone() -> None:
    world = as_left_by_the_former_version(running())
    uids = [pod["metadata"]["uid"] for pod in world.cluster.pods()]
    world.settle()
    assert services(world) == [FORMER]
    assert [pod["metadata"]["uid"] for pod in world.cluster.pods()] == uids
    assert world.status.phase is Phase.RUNNING


def test_a_pod_that_is_replaced_in_it_is_found_by_the_others() -> None:
    world = as_left_by_the_former_version(running())
    world.end_pod(1, 137)
    world.settle()
    assert (world.pod_names(), world.status.attempt) == (["0-0", "0-1"], 0)
    assert (services(world), subdomains(world)) == ([FORMER], [FORMER])


def test_a_service_of_the_former_version_that_was_deleted_is_there_again_while_its_gang_runs() -> None:
    world = as_left_by_the_former_version(running())
    world.cluster.remove_object((Kind.SERVICE, "team", FORMER))
    world.settle()
    assert (services(world), world.pod_names()) == ([FORMER], ["0-0", "0-1"])


@pytest.mark.parametrize(
    "happens",
    [
        pytest.param(lambda world: world.end_all_pods(137), id="the gang is replaced"),
        pytest.param(
            lambda world: (world.set_lifecycle(suspend=True), world.settle(), world.set_lifecycle(suspend=False)),
            id="the job is suspended and resumed",
        ),
    ],
)
def test_the_next_gang_has_the_service_of_this_version(happens: Callable[[World], object]) -> None:
    world = as_left_by_the_former_version(running())
    happens(world)
    world.settle()
    assert (world.pod_names(), subdomains(world)) == (["1-0", "1-1"], [PRESENT])
    assert services(world) == [FORMER, PRESENT]


def test_a_new_gang_stays_with_the_service_of_engines_that_outlive_the_old_one() -> None:
    world = as_left_by_the_former_version(running(**ENGINES))
    world.end_all_pods(137)
    world.settle()
    assert (world.pod_names(), subdomains(world)) == (["1-0", "1-1"], [FORMER])
    [urls] = {_urls(pod) for pod in world.cluster.pods(PodRole.TRAINER)}
    assert urls == f"http://job-rollout-0-00000.{FORMER}.team.svc:8000"


def _urls(pod: Body) -> str:
    env = pod["spec"]["containers"][0]["env"]
    return next(str(found["value"]) for found in env if found["name"] == Environment.ROLLOUT_URLS)
