"""Whole lives of jobs: what is seen on the way, and that a crash of the operator anywhere leads to the same end."""

from __future__ import annotations

from functools import partial

import pytest

from cluster.extent import IS_FULL
from fake_world import World
from moejob_api.contract.pods import ExitCode, PodOutcome, RunProgress, TerminationMessage
from moejob_api.job.status import ConditionType, Phase
from moejob_operator.children.gangs import GangApi
from scenarios import SCENARIOS, Scenario, Verb, play_scenario, pods_have_image, profile_deleted, profile_given

EVERY = pytest.mark.parametrize("scenario", [pytest.param(found, id=found.id) for found in SCENARIOS])


def lived(scenario: Scenario, crash_at: int | None = None) -> World:
    """The world after a whole story, with everything seen that was to be seen."""
    world = World(gang_apis=frozenset(GangApi(api) for api in scenario.apis))
    world.cluster.crash_at = crash_at
    return play_scenario(scenario, world)


@EVERY
def test_a_job_lives_like_this(scenario: Scenario) -> None:
    lived(scenario)


@EVERY
def test_nothing_is_written_at_rest(scenario: Scenario) -> None:
    world = lived(scenario)
    before = (world.cluster.versions, len(world.cluster.events), world.cluster.lists)
    for seconds in (0.0, 0.1, 0.1):
        world.wait(seconds)
        world.reconcile()
    assert (world.cluster.versions, len(world.cluster.events), world.cluster.lists) == before


@EVERY
def test_a_crash_after_any_change_leads_to_the_same_end(scenario: Scenario) -> None:
    whole = lived(scenario)
    # A third of the moments, other ones in each story, or all of them by `make test-faults`.
    first, stride = (0, 1) if IS_FULL else (SCENARIOS.index(scenario) % 3, 3)
    for crash_at in range(first, whole.cluster.halves, stride):
        world = lived(scenario, crash_at)
        assert world.crashes == 1
        assert world.fixed_point() == whole.fixed_point(), f"crashed at {crash_at}"


def test_what_pods_saved_while_they_were_stopped_is_told() -> None:
    """No story of the table: an operator that crashes just then does not hear it."""
    world = World()
    world.apply()
    for happens in (world.run, partial(world.report_progress, 6), partial(world.set_lifecycle, suspend=True)):
        world.settle()
        happens()
    # One look writes the next attempt, another asks the pods to end; they save before they do.
    world.reconcile()
    world.reconcile()
    run = RunProgress(step=7, last_checkpoint_step=7)
    world.end_all_pods(ExitCode.SAVED_AND_STOPPED, TerminationMessage(outcome=PodOutcome.PREEMPTED, run=run))
    world.settle()
    assert (world.status.phase, world.pod_names()) == (Phase.SUSPENDED, [])
    assert world.message(ConditionType.CHECKPOINTED) == "step 7 is saved"
    assert world.status.progress is not None
    assert world.status.progress.step == 7


@pytest.mark.parametrize("change", [profile_given("second:1"), profile_deleted], ids=["changed", "deleted"])
def test_a_profile_that_changes_when_the_operator_crashes_makes_no_gang_of_two_minds(change: Verb) -> None:
    """Whichever values the job was accepted with, all of its pods have them, those of later attempts too."""

    def live_until(crash_at: int | None) -> World:
        world = World()
        profile_given("first:1")(world)
        world.cluster.crash_at = crash_at
        world.apply(profile="shared")
        while crash_at is not None and not world.crashes:
            world.reconcile()
        if crash_at is not None:
            change(world)
        world.settle()
        return world

    for crash_at in range(live_until(None).cluster.halves):
        world = live_until(crash_at)
        recorded = world.status.profile
        if recorded is None:
            assert (world.pod_names(), world.condition(ConditionType.RUNNING)) == ([], "False ProfileMissing")
            continue
        image = recorded.values["resources"]["image"]
        pods_have_image(image)(world)
        world.end_pod(0, 1)
        world.settle()
        assert world.pod_names() == ["0-0", "0-1"]
        pods_have_image(image)(world)
        world.end_all_pods(1)
        world.settle()
        assert world.pod_names() == ["1-0", "1-1"]
        pods_have_image(image)(world)


def test_a_job_of_an_operator_from_before_profiles_goes_on() -> None:
    world = World()
    world.apply()
    world.settle()
    assert "profile" not in world.job["status"]
    world.run()
    world.settle()
    assert (world.status.phase, world.status.profile) == (Phase.RUNNING, None)
