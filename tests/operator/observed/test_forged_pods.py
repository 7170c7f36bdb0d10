"""Objects that others of the namespace make to look like a job's: not trusted, and no running gang pays for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fake_cluster import Body
from fake_world import World
from moejob_api.contract.pods import MANAGED_BY, Label
from moejob_api.job.status import ConditionType, Phase
from moejob_operator.actions import EventReason, Kind

GANG = ["job-trainer-0-00000", "job-trainer-0-00001"]
Forgery = Callable[[Body], None]


def world_of(*happens: Callable[[World], None]) -> World:
    """A job of two pods, to which these things have happened."""
    world = World()
    world.apply()
    world.settle()
    for happen in happens:
        happen(world)
        world.settle()
    return world


def forged(world: World, name: str, attempt: int, index: int, *changes: Forgery, phase: str = "Succeeded") -> None:
    """A pod with labels and owner reference as the job's own have them, and then with these changes."""
    body: Body = {
        "apiVersion": "v1",
        "kind": Kind.POD.value,
        "metadata": {
            "name": name,
            "namespace": world.key.namespace,
            "labels": {
                Label.MANAGED_BY.value: MANAGED_BY,
                Label.JOB.value: "job",
                Label.JOB_UID.value: world.job["metadata"]["uid"],
                Label.ROLE.value: "trainer",
                Label.ATTEMPT.value: str(attempt),
                Label.INDEX.value: str(index),
            },
            "ownerReferences": [
                {
                    "apiVersion": "moejob.dev/v1alpha1",
                    "kind": "MoETrainingJob",
                    "name": "job",
                    "uid": world.job["metadata"]["uid"],
                    "controller": True,
                }
            ],
        },
        "spec": {"terminationGracePeriodSeconds": 30},
        "status": {"phase": phase},
    }
    for change in changes:
        change(body)
    world.cluster.store_changed(body)


def label(key: Label, value: str) -> Forgery:
    """Another label."""
    return lambda body: body["metadata"]["labels"].update({key.value: value})


def reference(**fields: object) -> Forgery:
    """Another owner."""
    return lambda body: body["metadata"]["ownerReferences"][0].update(fields)


def names(world: World) -> list[str]:
    """Names of all pods."""
    return [pod["metadata"]["name"] for pod in world.cluster.pods()]


@pytest.mark.parametrize("attempt", [1, 999_999_999])
def test_a_pod_of_an_attempt_that_has_not_begun_is_deleted_and_the_gang_runs_on(attempt: int) -> None:
    world = world_of(World.run)
    name = f"job-trainer-{attempt}-00000"
    forged(world, name, attempt, 0, phase="Running")
    world.settle()
    assert (world.status.phase, world.status.attempt, names(world)) == (Phase.RUNNING, 0, GANG)
    [told] = [event for event in world.cluster.events if event.reason == EventReason.UNKNOWN_POD_DELETED]
    assert name in told.message


def test_a_pod_beyond_the_gang_is_deleted_and_the_gang_runs_on() -> None:
    world = world_of(World.run)
    forged(world, "job-trainer-0-00007", 0, 7, phase="Running")
    world.settle()
    assert (world.status.phase, world.status.attempt, names(world)) == (Phase.RUNNING, 0, GANG)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("z", (), id="another name"),
        pytest.param("job-trainer-0-00001x", (label(Label.INDEX, "1"),), id="nearly the name"),
        pytest.param("job-trainer-0-00007", (), id="a name that its labels contradict"),
        pytest.param("z", (label(Label.ATTEMPT, "999999999"),), id="a far attempt"),
        pytest.param("z", (label(Label.ROLE, "rollout"),), id="an engine"),
    ],
)
@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_whose_name_and_labels_differ_neither_ends_nor_fails_a_job(
    name: str, changes: tuple[Forgery, ...], phase: str
) -> None:
    world = world_of(World.run)
    for index in (0, 1):
        forged(world, f"{name}{index}", 0, index, *changes, phase=phase)
    world.settle()
    assert (world.status.phase, world.status.attempt) == (Phase.RUNNING, 0)
    assert set(GANG) < set(names(world))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(reference(controller=False), id="an owner that is no controller"),
        pytest.param(reference(kind="ReplicaSet", apiVersion="apps/v1"), id="an owner of another kind"),
        pytest.param(reference(apiVersion="example.com/v1"), id="an owner of another group"),
        pytest.param(reference(name="other"), id="an owner of another name"),
        pytest.param(lambda body: body["metadata"].pop("ownerReferences"), id="labels alone"),
        pytest.param(label(Label.JOB_UID, "uid-of-another"), id="the label of another job"),
    ],
)
def test_a_pod_that_holds_a_name_of_the_gang_is_told_and_neither_trusted_nor_deleted(change: Forgery) -> None:
    world = World()
    world.apply()
    forged(world, GANG[0], 0, 0, change)
    world.settle()
    assert world.condition(ConditionType.RUNNING) == "False CreationRefused"
    assert GANG[0] in world.message(ConditionType.RUNNING)
    assert world.status.phase is Phase.PENDING
    assert GANG[0] in names(world)
    assert not [line for line in world.cluster.log if line.startswith("delete")]


def test_labels_alone_hold_no_start_back() -> None:
    world = World()
    world.apply()
    forged(world, "someone", 0, 0, lambda body: body["metadata"].pop("ownerReferences"))
    world.settle()
    assert {*GANG, "someone"} == set(names(world))


def test_pods_of_an_earlier_job_of_the_name_are_waited_for() -> None:
    world = World()
    world.apply()
    earlier = "uid-of-earlier"
    forged(world, "job-trainer-4-00000", 4, 0, reference(uid=earlier), label(Label.JOB_UID, earlier), phase="Running")
    world.settle()
    assert world.condition(ConditionType.RUNNING) == "False NameTaken"
    assert names(world) == ["job-trainer-4-00000"]


def test_a_gang_whose_job_has_lost_its_status_is_not_replaced() -> None:
    world = world_of(World.run, lambda world: world.end_all_pods(1), World.run)
    assert world.status.attempt == 1
    world.cluster.store_changed({**world.job, "status": {}})
    world.settle()
    assert (world.status.attempt, names(world)) == (1, ["job-trainer-1-00000", "job-trainer-1-00001"])


def test_an_attempt_that_no_job_gets_to_is_not_believed_of_a_job_without_a_status() -> None:
    world = World()
    world.apply()
    forged(world, "job-trainer-999999999-00000", 999_999_999, 0, phase="Running")
    world.settle()
    assert (world.status.attempt, names(world)) == (0, GANG)
