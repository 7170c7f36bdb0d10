"""The body of a pod is read once: reconciles of a large gang at rest would do little else."""

from __future__ import annotations

from typing import Any

from fake_world import World
from moejob_operator.actions import Kind
from moejob_operator.cluster import Children
from moejob_operator.observed import Observation, PodPhase, PodReadings, SpecCache, read_observation


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
