"""`gang: Auto` stays within the schedulers that jobs may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from fake_world import World
from moejob_api.contract.pods import PodRole
from moejob_api.job.status import ConditionType
from moejob_operator.children.gangs import GangApi

QUEUED: dict[str, Any] = {"lifecycle": {"queue": "team"}}


def queued(schedulers: tuple[str, ...] | None, *apis: GangApi, **sections: Any) -> World:
    """A job that names a queue and no gang scheduler."""
    world = World(schedulers=schedulers, gang_apis=frozenset(apis))
    world.apply(**QUEUED | sections)
    world.settle()
    return world


@pytest.mark.parametrize("schedulers", [None, ("volcano",), ("volc*",)], ids=["no limit", "its name", "its beginning"])
def test_a_queue_is_volcanos_where_there_is_only_that_and_its_scheduler_is_allowed(
    schedulers: tuple[str, ...] | None,
) -> None:
    assert queued(schedulers, GangApi.VOLCANO).pod(0)["spec"]["schedulerName"] == "volcano"


@pytest.mark.parametrize("schedulers", [(), ("default-scheduler",)], ids=["none", "another"])
def test_a_job_beyond_its_schedulers_gets_no_pod_and_the_reason(schedulers: tuple[str, ...]) -> None:
    world = queued(schedulers, GangApi.VOLCANO)
    assert world.pod_names(PodRole.TRAINER) == []
    assert world.condition(ConditionType.RUNNING) == "False GangApiMissing"
    assert "whose scheduler volcano is beyond its limits" in world.message(ConditionType.RUNNING)


def test_kueue_needs_no_scheduler_of_its_own() -> None:
    world = queued((), GangApi.VOLCANO, GangApi.KUEUE)
    assert world.pod(0)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_a_job_that_began_before_the_limit_keeps_its_scheduler() -> None:
    world = queued(None, GangApi.VOLCANO)
    world.run()
    world.settle()
    world.schedulers = ()
    world.delete_pod(1)
    world.settle()
    assert world.pod(1)["spec"]["schedulerName"] == "volcano"
