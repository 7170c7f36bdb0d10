"""Events of a job: what happened to it, and nothing that its conditions say of a job that goes its usual way."""

from __future__ import annotations

from datetime import UTC, datetime

from fake_world import World
from moejob_api.job.status import Condition, ConditionStatus, ConditionType, Status
from moejob_operator.status.events import transition_events

TIME = datetime(2030, 1, 1, tzinfo=UTC).isoformat()


def accepted(status: ConditionStatus) -> Status:
    return Status(
        conditions=(
            Condition(type=ConditionType.ACCEPTED, status=status, reason="Accepted", last_transition_time=TIME),
        )
    )


def test_a_job_that_is_right_from_the_start_gets_one_event_when_it_runs() -> None:
    world = World()
    world.apply()
    world.settle()
    assert world.cluster.events == []
    world.run()
    world.settle()
    assert [event.reason for event in world.cluster.events] == ["Running"]


def test_a_job_that_is_accepted_later_than_it_was_refused_gets_an_event() -> None:
    refused, right = accepted(ConditionStatus.FALSE), accepted(ConditionStatus.TRUE)
    assert [event.reason for event in transition_events(Status(), refused)] == ["NotAccepted"]
    assert [event.reason for event in transition_events(refused, right)] == ["Accepted"]
    assert transition_events(right, right) == ()
