"""Whole lives of jobs: what is seen on the way, and that a crash of the operator anywhere leads to the same end."""

from __future__ import annotations

import pytest

from fake_world import World
from moejob_api.contract import Role
from moejob_api.job.status import ConditionType
from moejob_operator.children.gangs import GangApi
from scenarios import SCENARIOS, Scenario, See

EVERY = pytest.mark.parametrize("scenario", [pytest.param(found, id=found.id) for found in SCENARIOS])


def lived(scenario: Scenario, crash_at: int | None = None) -> World:
    """The world after a whole story, with everything seen that was to be seen."""
    world = World(gang_apis=frozenset(GangApi(api) for api in scenario.apis))
    world.cluster.crash_at = crash_at
    world.apply(**scenario.job)
    for number, (verb, see) in enumerate(scenario.story):
        verb(world)
        world.settle()
        check(world, see, number)
    return world


def check(world: World, see: See, number: int) -> None:
    """Compare what is there with what is to be seen."""
    if see.phase == "gone" or world.is_gone:
        assert (see.phase, world.is_gone) == ("gone", True), f"step {number}"
        return
    restarts = world.status.restarts
    failure = world.status.last_failure
    told = " ".join([*(found.message for found in world.status.conditions), failure.message if failure else ""])
    actual = See(
        phase=world.status.phase,
        pods=" ".join(world.names()),
        engines=" ".join(world.names(Role.ROLLOUT)),
        attempt=world.status.attempt,
        spent=restarts.since_checkpoint,
        uncounted=restarts.ladder.uncounted,
        why=world.condition(ConditionType.RUNNING).partition(" ")[2],
        failure=failure.reason if failure else None,
    )
    wanted = {name: value for name, value in vars(see).items() if value is not None and name != "says"}
    assert {name: getattr(actual, name) for name in wanted} == wanted, f"step {number}"
    assert see.says in told, f"step {number}"


@EVERY
def test_a_job_lives_like_this(scenario: Scenario) -> None:
    lived(scenario)


@EVERY
def test_nothing_is_written_at_rest(scenario: Scenario) -> None:
    world = lived(scenario)
    before = (world.cluster.versions, len(world.cluster.notices), world.cluster.lists)
    for seconds in (0.0, 0.1, 0.1):
        world.wait(seconds)
        world.look()
    assert (world.cluster.versions, len(world.cluster.notices), world.cluster.lists) == before


@EVERY
def test_a_crash_after_any_change_leads_to_the_same_end(scenario: Scenario) -> None:
    whole = lived(scenario)
    for crash_at in range(whole.cluster.halves):
        world = lived(scenario, crash_at)
        assert world.crashes == 1
        assert world.fixed_point() == whole.fixed_point(), f"crashed at {crash_at}"
