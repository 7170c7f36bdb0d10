"""Grace periods of pods: their own grace where they can save, and seconds where there is nothing to be saved."""

from __future__ import annotations

from fake_world import World
from moejob_operator.children.gangs import GangApi
from moejob_operator.planning.objects import BROKEN_GANG_SECONDS


def running(gang_apis: frozenset[GangApi] = frozenset(), **lifecycle: object) -> World:
    """A job of two pods that run."""
    world = World(gang_apis=gang_apis)
    world.apply(lifecycle=lifecycle)
    world.settle()
    world.run()
    world.settle()
    return world


def test_what_is_left_of_a_gang_that_has_failed_goes_soon() -> None:
    # A gang whose pods cannot be replaced alone.
    world = running(frozenset({GangApi.KUEUE}), queue="team")
    world.end_pod(0, 1, None)
    world.settle()
    assert world.cluster.graces["job-trainer-0-00001"] == BROKEN_GANG_SECONDS


def test_pods_of_a_job_that_is_suspended_get_their_own_grace() -> None:
    world = running()
    world.set_lifecycle(suspend=True)
    world.settle()
    assert set(world.cluster.graces.values()) == {None}


def test_no_kubelet_is_asked_to_end_a_pod_of_a_node_that_is_lost() -> None:
    world = running()
    world.lose_sight(0)
    world.settle()
    assert world.cluster.graces == {"job-trainer-0-00000": 0}
