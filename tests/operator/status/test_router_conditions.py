"""A collapsed router is a condition and an event, written when its meaning changes, and over when it recovers."""

from __future__ import annotations

from fake_world import World, running_world
from moejob_api.contract.pods import ExitCode, PodOutcome, TerminationMessage
from moejob_api.job.status import ConditionType
from moejob_api.router_health import collapse_text, health_measures

KIND = ConditionType.ROUTER_COLLAPSED
POLL_SECONDS = 31.0


def report(world: World, step: int, layers: tuple[int, ...] | None) -> None:
    """Let pod 0 report these layers, and the operator poll it."""
    world.report_progress(step, measures={"collapsedLayers": 1.0, **health_measures(layers)})
    world.wait(POLL_SECONDS)
    world.settle()


def router_events(world: World) -> list[str]:
    return [f"{event.severity} {event.reason}" for event in world.cluster.events if event.reason.startswith("Router")]


def written(world: World) -> object:
    return next((entry for entry in world.status.conditions if entry.type is KIND), None)


def test_a_run_with_sound_routers_has_no_condition_about_them() -> None:
    world = running_world()
    report(world, 3, None)
    report(world, 8, ())
    assert written(world) is None
    assert world.status.why is None


def test_a_collapsed_router_is_a_condition_an_event_and_an_obstacle() -> None:
    world = running_world()
    report(world, 5, (3, 4, 5))
    assert world.condition(KIND) == "True ExpertsUnused"
    assert world.message(KIND) == collapse_text((3, 4, 5))
    assert router_events(world) == ["Warning RouterCollapsed"]
    assert world.status.why is not None
    assert (world.status.why.blocker, world.status.why.message) == ("RouterCollapsed", collapse_text((3, 4, 5)))


def test_the_condition_is_written_again_when_its_meaning_changes_alone() -> None:
    world = running_world()
    report(world, 5, (3,))
    first = written(world)
    report(world, 6, (3,))
    # A restart: nothing is known before five steps.
    report(world, 6, None)
    assert written(world) == first
    report(world, 11, (3, 4))
    assert world.message(KIND) == collapse_text((3, 4))
    assert router_events(world) == ["Warning RouterCollapsed"]


def test_a_router_that_recovers_is_over() -> None:
    world = running_world()
    report(world, 5, (3,))
    report(world, 40, ())
    assert world.condition(KIND) == "False Recovered"
    assert router_events(world) == ["Warning RouterCollapsed", "Normal RouterRecovered"]
    assert world.status.why is None
    report(world, 80, (1,))
    assert router_events(world)[2:] == ["Warning RouterCollapsed"]


def test_the_condition_outlives_the_run() -> None:
    world = running_world()
    report(world, 99, (3,))
    world.end_all_pods(ExitCode.DONE, TerminationMessage(outcome=PodOutcome.COMPLETED))
    world.settle()
    assert world.status.phase == "Succeeded"
    assert world.condition(KIND) == "True ExpertsUnused"
    assert router_events(world) == ["Warning RouterCollapsed"]
