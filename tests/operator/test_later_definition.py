"""A definition of a later release fills fields into jobs that this operator does not know."""

from __future__ import annotations

from typing import Any

from builders import merge_sections
from fake_world import World, running_world
from moejob_api.job.status import ConditionType

LATER: dict[str, Any] = {"newSection": {"a": 1}, "storage": {"newField": True}, "data": {"train": [{"newField": 1}]}}


def fill_defaults(world: World) -> None:
    """The next read of a stored job has the defaults of a later definition, without another generation."""
    spec = merge_sections(world.job["spec"], {name: LATER[name] for name in ("newSection", "storage")})
    spec["data"] = spec["data"] | {"train": [item | {"newField": 1} for item in spec["data"]["train"]]}
    world.cluster.store_changed(world.job | {"spec": spec})


def test_an_operator_that_starts_anew_keeps_and_mends_the_gang_of_such_a_job() -> None:
    world = running_world()
    before = world.pod(1)["metadata"]["uid"]
    fill_defaults(world)
    world.restart_operator()
    world.settle()
    assert world.pod(1)["metadata"]["uid"] == before
    world.delete_pod(1)
    world.settle()
    assert world.pod(1)["metadata"]["uid"] != before


def test_such_a_job_can_be_suspended() -> None:
    world = running_world()
    fill_defaults(world)
    world.restart_operator()
    world.set_lifecycle(suspend=True)
    world.settle()
    world.kubelets_delete()
    world.settle()
    assert world.status.phase == "Suspended"


def test_a_new_job_with_a_field_that_nothing_here_obeys_is_refused_by_its_name() -> None:
    world = World()
    world.apply(storage={"newField": True})
    world.settle()
    assert world.condition(ConditionType.ACCEPTED).startswith("False")
    assert 'unknown field "newField"' in world.message(ConditionType.ACCEPTED)
    assert [kind for kind, _, _ in world.cluster.objects if kind != "MoETrainingJob"] == []
