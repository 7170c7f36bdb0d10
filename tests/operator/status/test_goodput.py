"""The goodput of a job, second by second."""

from __future__ import annotations

from typing import Any

import pytest

from fake_world import World
from moejob_api.contract.pods import PodOutcome, PodRole, RankFault, RunProgress, TerminationMessage
from moejob_api.job.status import Goodput, Phase
from scenarios import GRPO, assert_all_time_is_counted

# Two pods of one GPU each.
GPUS = 2
HOUR = 3600.0


def reconcile_often(world: World) -> None:
    """Return what follows at once; no time passes."""
    for _ in range(6):
        world.reconcile()
        world.kubelets_delete()
        world.cluster.controllers_act()


def read_goodput(world: World) -> Goodput:
    """The sums as they are written, which share all the time among them."""
    assert world.status.goodput is not None
    assert_all_time_is_counted(world.status)
    return world.status.goodput


def report_progress(world: World, step: int, stepping_seconds: float, after: float, **more: Any) -> Goodput:
    """Pods answer so long after what was before."""
    world.wait(after)
    world.report_progress(step, stepping_seconds=stepping_seconds, **more)
    reconcile_often(world)
    return read_goodput(world)


def running(**sections: Any) -> World:
    """Pods wait a minute for their nodes, and run."""
    world = World()
    world.apply(**sections)
    reconcile_often(world)
    world.wait(60)
    world.run()
    reconcile_often(world)
    return world


def stepping(**sections: Any) -> World:
    """It has done 100 steps of a second each, and took 75 seconds until the first."""
    world = running(**sections)
    report_progress(world, step=25, stepping_seconds=25, after=40)
    report_progress(world, step=100, stepping_seconds=100, after=75)
    return world


def started_again(world: World, after: float) -> None:
    """The next pods are made, and run so much later."""
    world.wait(after)
    reconcile_often(world)
    world.run()
    reconcile_often(world)


def pause(world: World) -> None:
    """Suspended five seconds later, for a thousand; then the next pods are made, and run after thirty."""
    world.wait(5)
    world.set_lifecycle(suspend=True)
    reconcile_often(world)
    world.wait(1000)
    world.set_lifecycle(suspend=False)
    reconcile_often(world)
    started_again(world, after=30)


def test_of_a_first_start_only_the_steps_are_productive() -> None:
    world = running()
    found = report_progress(world, step=25, stepping_seconds=25, after=40)
    assert (found.starting_seconds, found.productive_seconds, found.lost_seconds) == (75, 25, 0)


def test_from_then_on_all_time_is_productive_to_the_end() -> None:
    world = stepping()
    world.wait(20)
    word = RunProgress(step=100, total_steps=100, last_checkpoint_step=100, stepping_seconds=101)
    world.end_all_pods(0, TerminationMessage(outcome=PodOutcome.COMPLETED, run=word))
    reconcile_often(world)
    assert world.status.phase is Phase.SUCCEEDED
    assert (
        read_goodput(world).starting_seconds,
        read_goodput(world).productive_seconds,
        read_goodput(world).lost_seconds,
    ) == (75, 120, 0)


def test_what_a_failure_costs_is_lost_until_the_next_step_with_the_steps_that_are_done_again() -> None:
    world = stepping()
    world.wait(10)
    world.end_all_pods(1)
    reconcile_often(world)
    assert read_goodput(world).lost_seconds == 10
    started_again(world, after=60)
    found = report_progress(world, step=80, stepping_seconds=5, after=20)
    # Ten until it failed, 60 until pods ran, 15 until they had steps to do; and 20 of 100 steps are done again.
    assert (found.productive_seconds, found.lost_seconds) == (100 - 20 + 5, 10 + 60 + 15 + 20)
    assert found.starting_seconds == 75
    # No pod held a GPU for the minute.
    assert found.lost_gpu_hours == pytest.approx((10 + 15 + 20) * GPUS / HOUR, abs=0.001)


def test_a_hang_is_lost_from_the_last_news_on() -> None:
    world = stepping()
    world.wait(1800)
    world.report_progress(
        100, stepping_seconds=100, restarts=1, fault=RankFault(outcome=PodOutcome.HUNG, message="no step")
    )
    reconcile_often(world)
    assert world.status.restarts.since_checkpoint == 1
    assert (read_goodput(world).productive_seconds, read_goodput(world).lost_seconds) == (100, 1800)
    assert read_goodput(world).lost_gpu_hours == GPUS * 0.5
    found = report_progress(world, step=120, stepping_seconds=20, after=35, restarts=1)
    assert (found.productive_seconds, found.lost_seconds) == (120, 1815)


def test_gangs_that_fail_before_their_first_step_are_lost_time() -> None:
    world = running()
    for _ in range(2):
        world.wait(30)
        world.end_all_pods(1)
        reconcile_often(world)
        started_again(world, after=120)
    assert (read_goodput(world).starting_seconds, read_goodput(world).lost_seconds) == (60, 2 * (30 + 120))
    assert read_goodput(world).lost_gpu_hours == pytest.approx(2 * 30 * GPUS / HOUR, abs=0.001)


def test_pods_that_wait_for_another_hold_their_gpus_meanwhile() -> None:
    world = stepping()
    world.end_pod(1, 1)
    reconcile_often(world)
    assert world.pod_names() == ["0-0", "0-1"]
    started_again(world, after=600)
    assert read_goodput(world).lost_seconds == 600
    assert read_goodput(world).lost_gpu_hours == pytest.approx(600 / HOUR, abs=0.001)


def test_ranks_on_cpus_lose_no_gpu_hours() -> None:
    world = stepping(resources={"accelerator": "CPU", "cpu": 1, "memory": "8Gi", "sharedMemory": "1Gi"})
    world.wait(3600)
    world.end_all_pods(1)
    reconcile_often(world)
    assert (read_goodput(world).lost_seconds, read_goodput(world).lost_gpu_hours) == (3600, 0)


def test_engines_that_wait_for_a_gang_hold_their_gpus_meanwhile() -> None:
    world = stepping(**GRPO)
    world.end_all_pods(1)
    reconcile_often(world)
    assert world.pod_names(PodRole.ROLLOUT) == ["0-0", "0-1"]
    started_again(world, after=600)
    assert read_goodput(world).lost_gpu_hours == pytest.approx(600 * 2 / HOUR, abs=0.001)


def test_a_pause_is_neither_lost_nor_productive_and_the_start_after_it_is_a_start() -> None:
    world = stepping()
    pause(world)
    found = report_progress(world, step=110, stepping_seconds=10, after=15)
    assert (found.suspended_seconds, found.lost_seconds) == (1000, 0)
    assert (found.starting_seconds, found.productive_seconds) == (75 + 35, 105 + 10)


def test_a_failure_before_a_pause_has_nothing_to_do_with_the_start_after_it() -> None:
    world = stepping()
    world.end_all_pods(1)
    reconcile_often(world)
    pause(world)
    assert (
        read_goodput(world).lost_seconds,
        read_goodput(world).suspended_seconds,
        read_goodput(world).starting_seconds,
    ) == (5, 1000, 105)


def test_a_pause_before_the_first_pods_is_nobodys_time_and_moves_no_deadline() -> None:
    world = World()
    world.apply(lifecycle={"suspend": True, "activeDeadlineSeconds": 300})
    reconcile_often(world)
    world.wait(1000)
    world.set_lifecycle(suspend=False)
    reconcile_often(world)
    world.run()
    reconcile_often(world)
    world.wait(299)
    reconcile_often(world)
    before = world.status.phase
    world.wait(1)
    reconcile_often(world)
    assert (before, world.status.phase) == (Phase.RUNNING, Phase.FAILED)
    assert read_goodput(world).suspended_seconds == 0


def test_the_clock_of_the_next_operator_may_be_behind() -> None:
    world = stepping()
    before = read_goodput(world)
    world.wait(-50)
    world.end_all_pods(1)
    reconcile_often(world)
    assert read_goodput(world).updated_at == before.updated_at
    assert read_goodput(world).lost_seconds == 0
