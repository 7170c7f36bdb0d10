"""Polls of pods: a poll is a conversation with each of them, and those that are silent take longest."""

from __future__ import annotations

import pytest

from fake_world import World
from moejob_api.contract.pods import PodOutcome, RunProgress, TerminationMessage
from moejob_api.job.status import ConditionType, HubCommit, Phase, RepositoryKind
from moejob_operator.planning.phase_guards import POLL_SECONDS
from moejob_operator.status.conditions import written_condition


def running(**resources: int) -> World:
    """A job of two pods that run and do not answer, asked for the first time."""
    world = World()
    world.apply(resources=resources)
    world.settle()
    world.run()
    world.settle()
    assert world.cluster.questions == 2
    return world


def test_silent_pods_are_asked_when_it_is_time_and_not_at_every_look() -> None:
    world = running()
    for _ in range(5):
        world.reconcile()
    assert world.cluster.questions == 2
    world.wait(POLL_SECONDS)
    world.reconcile()
    assert world.cluster.questions == 4


def test_pods_are_asked_though_a_spare_has_no_node() -> None:
    world = running(spares=1)
    assert world.pod_names() == ["0-0", "0-1", "0-2"]
    world.wait(POLL_SECONDS)
    world.reconcile()
    assert world.cluster.questions == 4


def test_young_pods_are_asked_each_time_they_are_twice_as_old_and_others_every_half_minute() -> None:
    world = running()
    asked_at, age = [], 0.0
    while age < 100:
        before = world.cluster.questions
        again = world.reconcile()
        if world.cluster.questions > before:
            asked_at.append(age)
        assert again is not None
        world.wait(again)
        age += again
    assert asked_at == [5, 10, 20, 40, 70]


def test_pods_of_a_new_gang_are_asked_at_once() -> None:
    world = running()
    world.end_all_pods(1)
    world.settle()
    world.wait(POLL_SECONDS)
    world.settle()
    before = world.cluster.questions
    world.run()
    world.settle()
    assert world.cluster.questions > before


def test_the_last_word_says_where_a_run_ended_that_nobody_had_asked_lately() -> None:
    world = running()
    done = RunProgress(step=60, total_steps=60, loss=0.5, last_checkpoint_step=60)
    world.end_pod(1, 0, TerminationMessage(outcome=PodOutcome.COMPLETED))
    world.end_pod(0, 0, TerminationMessage(outcome=PodOutcome.COMPLETED, run=done))
    world.settle()
    assert world.status.phase is Phase.SUCCEEDED
    assert world.status.progress is not None
    seen = world.status.progress
    assert (seen.step, seen.loss, seen.last_checkpoint_step) == (60, 0.5, 60)


def ended(run: RunProgress) -> World:
    """A job whose pods have ended, with the last word of the first."""
    world = running()
    world.end_pod(1, 0, TerminationMessage(outcome=PodOutcome.COMPLETED))
    world.end_pod(0, 0, TerminationMessage(outcome=PodOutcome.COMPLETED, run=run))
    world.settle()
    return world


def test_the_best_evaluation_is_part_of_the_status() -> None:
    measures = {"evalScore": 2.5, "bestStep": 40.0, "bestScore": 2.25, "evalLoss": 2.5}
    seen = ended(RunProgress(step=60, total_steps=60, measures=measures)).status.progress
    assert seen is not None
    assert (seen.eval_score, seen.best_step, seen.best_score) == (2.5, 40, 2.25)


COMMITS = tuple(
    HubCommit(kind=kind, name="team/tiny", commit=letter * 40)
    for kind, letter in ((RepositoryKind.MODEL, "a"), (RepositoryKind.DATASET, "b"))
)


def test_the_commits_of_the_hub_that_a_run_uses_are_part_of_the_status() -> None:
    seen = ended(RunProgress(step=60, total_steps=60, hub_commits=COMMITS)).status.progress
    assert seen is not None
    assert seen.hub_commits == COMMITS


def test_a_last_word_without_room_for_commits_takes_none_away() -> None:
    world = running()
    world.report_progress(step=5, hub_commits=COMMITS)
    world.wait(POLL_SECONDS)
    world.settle()
    world.end_pod(1, 0, TerminationMessage(outcome=PodOutcome.COMPLETED))
    world.end_pod(0, 0, TerminationMessage(outcome=PodOutcome.COMPLETED, run=RunProgress(step=60, total_steps=60)))
    world.settle()
    seen = world.status.progress
    assert seen is not None
    assert (seen.step, seen.hub_commits) == (60, COMMITS)


@pytest.mark.parametrize(
    ("measures", "seen", "shown"),
    [
        pytest.param({}, (None, None), ("0.5", "", ""), id="nothing evaluated yet"),
        pytest.param({"evalScore": 2.5, "evalLoss": 2.5}, (2.5, 2.5), ("0.5", "2.5", "2.5"), id="a loss"),
        pytest.param({"evalScore": 0.75, "evalLoss": 2.5}, (2.5, 0.75), ("0.5", "0.75", "2.5"), id="loss and answers"),
        pytest.param({"evalScore": 1 / 3}, (None, 1 / 3), ("0.5", "0.3333", ""), id="answers alone"),
    ],
)
def test_kubectl_shows_evaluations_beside_the_loss_of_training(
    measures: dict[str, float], seen: tuple[float | None, ...], shown: tuple[str, ...]
) -> None:
    status = ended(RunProgress(step=60, total_steps=60, loss=0.5, measures=measures)).status
    assert status.progress is not None
    assert (status.progress.eval_loss, status.progress.eval_score) == seen
    assert status.display is not None
    assert (status.display.score, status.display.eval_score, status.display.eval_loss) == shown


@pytest.mark.parametrize("number", [-1.0, 1e38])
def test_a_best_step_that_is_none_is_passed_over(number: float) -> None:
    seen = ended(RunProgress(step=60, total_steps=60, measures={"bestStep": number})).status.progress
    assert seen is not None
    assert (seen.step, seen.best_step) == (60, None)


@pytest.mark.parametrize(
    ("measures", "reason", "says"),
    [
        ({}, "Completed", "every rank has finished"),
        ({"stoppedEarly": 1.0}, "StoppedEarly", "stopped early at step 40, where evaluations had not improved"),
    ],
)
def test_a_run_that_stopped_early_has_succeeded_and_says_so(measures: dict[str, float], reason: str, says: str) -> None:
    world = ended(RunProgress(step=40, total_steps=40, measures=measures))
    found = written_condition(world.status, ConditionType.SUCCEEDED)
    assert world.status.phase is Phase.SUCCEEDED
    assert found is not None
    assert found.reason == reason
    assert says in found.message


def test_a_pod_that_nobody_hears_of_is_waited_for_once_and_not_before_every_action() -> None:
    world = running()
    world.report_progress(step=5)
    world.lose_sight(1)
    world.fall_silent(1)
    before = world.cluster.questions
    world.settle()
    assert world.pod_names() == ["0-0", "0-1"]
    assert world.cluster.log[-3:] == [
        "force-delete Pod job-trainer-0-00001",
        "create Pod job-trainer-0-00001",
        "write status",
    ]
    assert world.cluster.questions == before + 2


def test_what_is_remembered_of_a_job_goes_with_it() -> None:
    world = running()
    assert len(world.poll_times) == 1
    world.delete_job()
    world.reconcile()
    assert len(world.poll_times) == 0
