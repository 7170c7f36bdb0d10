"""A GRPO run that learns little has a condition and an event, written when its meaning changes, and over in time."""

from __future__ import annotations

import pytest

from fake_world import World, running_world
from moejob_api.job.status import ConditionType
from moejob_api.learning_signals import SignalKind, signal_measures, signals_text
from moejob_api.router_health import health_measures

KIND = ConditionType.NOTHING_LEARNED
POLL_SECONDS = 31.0
FLAT, CUT = SignalKind.FLAT, SignalKind.CUT


def report(world: World, step: int, signals: tuple[SignalKind, ...] | None) -> None:
    """Let pod 0 report these signs, and the operator poll it."""
    world.report_progress(step, measures={**health_measures(()), **signal_measures(signals)})
    world.wait(POLL_SECONDS)
    world.settle()


def signal_events(world: World) -> list[str]:
    return [
        f"{event.severity} {event.reason}"
        for event in world.cluster.events
        if event.reason in ("NothingLearned", "LearningAgain")
    ]


def written(world: World) -> object:
    return next((entry for entry in world.status.conditions if entry.type is KIND), None)


def test_a_run_that_learns_has_no_condition_about_it() -> None:
    world = running_world()
    report(world, 3, None)
    report(world, 8, ())
    assert written(world) is None
    assert world.status.why is None


@pytest.mark.parametrize(
    ("signals", "reason"),
    [
        pytest.param((FLAT,), "EqualRewards", id="equal rewards"),
        pytest.param((CUT,), "AnswersCutOff", id="answers that are cut off"),
        pytest.param((FLAT, CUT), "EqualRewards", id="both"),
    ],
)
def test_a_run_that_learns_little_has_a_condition_an_event_and_an_obstacle(
    signals: tuple[SignalKind, ...], reason: str
) -> None:
    world = running_world()
    report(world, 5, signals)
    assert world.condition(KIND) == f"True {reason}"
    assert signal_events(world) == ["Warning NothingLearned"]
    assert world.status.why is not None
    assert (world.status.why.blocker, world.status.why.message) == ("NothingLearned", signals_text(signals))


def test_the_condition_is_written_again_when_its_meaning_changes_alone() -> None:
    world = running_world()
    report(world, 5, (FLAT,))
    first = written(world)
    report(world, 6, (FLAT,))
    # A restart: nothing is known before five steps.
    report(world, 6, None)
    assert written(world) == first
    report(world, 11, (FLAT, CUT))
    assert world.message(KIND) == signals_text((FLAT, CUT))
    assert signal_events(world) == ["Warning NothingLearned"]


def test_a_run_that_learns_again_has_nothing_in_its_way() -> None:
    world = running_world()
    report(world, 5, (CUT,))
    report(world, 40, ())
    assert world.condition(KIND) == "False Recovered"
    assert signal_events(world) == ["Warning NothingLearned", "Normal LearningAgain"]
    assert world.status.why is None
