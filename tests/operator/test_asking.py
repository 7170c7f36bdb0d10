"""Polls of pods: a poll is a conversation with each of them, and those that are silent take longest."""

from __future__ import annotations

from fake_world import World
from moejob_api.contract import LastWord, Outcome, RunProgress
from moejob_api.job.status import Phase
from moejob_operator.planning.guards import POLL_SECONDS


def running() -> World:
    """A job of two pods that run and do not answer, asked for the first time."""
    world = World()
    world.apply()
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


def test_pods_of_a_new_gang_are_asked_at_once() -> None:
    world = running()
    world.end(0, 1, None)
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
    world.end(1, 0, LastWord(outcome=Outcome.COMPLETED))
    world.end(0, 0, LastWord(outcome=Outcome.COMPLETED, run=done))
    world.settle()
    assert world.status.phase is Phase.SUCCEEDED
    assert world.status.progress is not None
    seen = world.status.progress
    assert (seen.step, seen.loss, seen.last_checkpoint_step) == (60, 0.5, 60)


def test_a_pod_that_nobody_hears_of_is_waited_for_once_and_not_before_every_action() -> None:
    world = running()
    world.say(step=5)
    world.lose_sight(1)
    world.fall_silent(1)
    before = world.cluster.questions
    world.settle()
    assert world.names() == ["0-0", "0-1"]
    assert world.cluster.log[-4:] == [
        "force-delete Pod job-trainer-0-00001",
        "create Secret job-uid-1",
        "create Pod job-trainer-0-00001",
        "write status",
    ]
    assert world.cluster.questions == before + 2


def test_what_is_remembered_of_a_job_goes_with_it() -> None:
    world = running()
    assert len(world.asked) == 1
    world.delete_job()
    world.reconcile()
    assert len(world.asked) == 0
