"""The body of a pod is read once: reconciles of a large gang at rest would do little else."""

from __future__ import annotations

from typing import Any

from fake_world import World
from moejob_operator.actions import Kind
from moejob_operator.cluster import Children
from moejob_operator.observed import Observation, Pod, PodPhase, PodReadings, SpecCache, read_observation


def bodies() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A job and its pods."""
    world = World()
    world.apply()
    world.settle()
    return world.cluster.objects[Kind.JOB, "team", "job"], list(world.cluster.pods())


def seen(job: dict[str, Any], pods: list[dict[str, Any]], readings: PodReadings) -> Observation:
    return read_observation(job, Children(tuple(pods), (), (), ()), SpecCache(), readings)


def test_a_body_that_is_the_same_is_read_once() -> None:
    job, pods = bodies()
    readings = PodReadings()
    first, second = (seen(job, pods, readings).pods for _ in range(2))
    assert len(first) == len(pods)
    assert all(before is after for before, after in zip(first, second, strict=True))


def test_a_newer_body_of_a_pod_is_read() -> None:
    job, pods = bodies()
    readings = PodReadings()
    seen(job, pods, readings)
    newer = [pods[0] | {"status": {"phase": "Running"}}, *pods[1:]]
    assert {pod.phase for pod in seen(job, newer, readings).pods if pod.uid == pods[0]["metadata"]["uid"]} == {
        PodPhase.RUNNING
    }


def test_a_pod_that_is_gone_is_not_kept() -> None:
    job, pods = bodies()
    readings = PodReadings()
    seen(job, pods, readings)
    assert seen(job, [], readings).pods == ()


def test_the_next_job_of_this_name_does_not_take_over_what_was_read_for_the_one_before() -> None:
    job, pods = bodies()
    readings = PodReadings()
    seen(job, pods, readings)
    successor = job | {"metadata": job["metadata"] | {"uid": "another"}}
    found = seen(successor, pods, readings)
    assert (found.pods, len(found.earlier_pods)) == ((), len(pods))


def ended(code: int) -> dict[str, Any]:
    return {"state": {"terminated": {"exitCode": code, "finishedAt": "2030-01-01T00:00:00Z"}}}


def read_one(status: dict[str, Any], init_containers: list[dict[str, Any]]) -> Pod:
    """The first pod, with init containers and a status."""
    job, pods = bodies()
    patched = pods[0] | {"spec": pods[0]["spec"] | {"initContainers": init_containers}, "status": status}
    found = seen(job, [patched], PodReadings())
    return next(pod for pod in found.pods if pod.uid == pods[0]["metadata"]["uid"])


SIDECAR = {"name": "daemon", "restartPolicy": "Always"}
# The kubelet ends a sidecar once the trainer has ended, by force where it does not listen.
KILLED_SIDECAR = {"name": "daemon", **ended(137)}


def test_a_sidecar_that_is_killed_behind_a_finished_trainer_is_no_failure() -> None:
    status = {
        "phase": "Succeeded",
        "initContainerStatuses": [KILLED_SIDECAR],
        "containerStatuses": [{"name": "trainer", **ended(0)}],
    }
    pod = read_one(status, [SIDECAR])
    assert pod.ended is not None
    assert (pod.phase, pod.ended.exit_code) == (PodPhase.SUCCEEDED, 0)


def test_a_sidecar_that_ends_beside_a_running_trainer_is_no_end_of_the_pod() -> None:
    running = {"name": "trainer", "state": {"running": {"startedAt": "2030-01-01T00:00:00Z"}}}
    crashed = {"name": "daemon", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended(1)["state"]}
    status = {"phase": "Running", "initContainerStatuses": [crashed], "containerStatuses": [running]}
    pod = read_one(status, [SIDECAR])
    assert (pod.ended, pod.ended_before, pod.waiting) == (None, None, None)


def test_an_init_container_that_fails_is_the_end_of_the_pod() -> None:
    status = {"phase": "Failed", "initContainerStatuses": [{"name": "first", **ended(3)}], "containerStatuses": []}
    pod = read_one(status, [{"name": "first"}])
    assert pod.ended is not None
    assert pod.ended.exit_code == 3


def test_a_sidecar_that_cannot_start_is_what_a_pod_waits_for() -> None:
    pulled = {"name": "daemon", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    waits = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    status = {"phase": "Pending", "initContainerStatuses": [pulled], "containerStatuses": [waits]}
    pod = read_one(status, [SIDECAR])
    assert pod.waiting is not None
    assert pod.waiting.reason == "ImagePullBackOff"
