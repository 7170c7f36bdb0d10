"""Faults of a job in the midst of its training, on two real nodes, and its recovery.

MOEJOB_FAULTS=full does everything; otherwise it is what happens to every cluster sooner or later.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cluster.control_plane.components import Component
from cluster.control_plane.releases import Release
from cluster.extent import IS_FULL, in_full
from cluster.nodes.cluster import Cluster
from cluster.nodes.fault_harness import EVERY, MODELS, STEPS, FaultHarness, start_fault_harness
from cluster.nodes.faults import (
    SHIFT_FILE,
    damage_checkpoint,
    drain_node,
    exhaust_memory,
    fill_volume,
    hold_launcher,
    is_alive,
    kill_operator_and_pod,
    kill_pod,
    kill_processes,
    kill_rank,
    pause_rank,
    resume_rank,
    shift_clock,
    standing_still,
)
from cluster.nodes.packages import find_faketime
from cluster.nodes.recovery import GangPod, measure_recovery
from cluster.nodes.storage import StorageClass
from cluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
# Memory takes its time to run out, and a node to be drained.
LONG_STEPS = 40
# Python sleeps until a time of the monotonic clock, which libfaketime takes for the wrong one and refuses.
RELATIVE_SLEEP = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"


@pytest.fixture(scope="module")
def harness(nodes: Cluster, home: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultHarness]:
    """Yield where jobs are taken in."""
    with start_fault_harness(nodes, home, tmp_path_factory.mktemp("ward"), LONG_STEPS if IS_FULL else STEPS) as opened:
        yield opened


@in_full
def test_a_replica_of_the_operator_that_goes_comes_back_where_the_other_is_not(harness: FaultHarness) -> None:
    """Else the loss of one node could be the loss of both."""
    harness.spread_operator()
    harness.replace_replica()
    assert harness.operator_nodes() == {*harness.nodes.nodes}


# --- what happens to every cluster --------------------------------------------------------------------------------


@in_full
def test_a_rank_that_is_killed_is_started_again_in_its_pod(harness: FaultHarness) -> None:
    with harness.run_job() as target:
        found = harness.check_recovery(target, lambda pods: kill_rank(pods[1]))
        status = target.job.read()["status"]
    assert (found.new_pods, found.new_launchers, found.new_ranks) == (set(), set(), {0, 1})
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (0, 0)
    assert (status["restarts"]["ranks"], status["lastFailure"]["reason"]) == (1, "RankFailed")


def test_a_pod_that_is_killed_is_replaced_alone(harness: FaultHarness) -> None:
    with harness.run_job() as target:
        found = harness.check_recovery(
            target, lambda pods: kill_pod(harness.nodes, harness.home.namespace, pods[1].name)
        )
        status = target.job.read()["status"]
    assert (found.new_pods, found.new_launchers, found.new_ranks) == ({1}, {1}, {0, 1})
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (1, 0)


@in_full
def test_a_spare_takes_the_place_of_a_pod_that_is_killed(harness: FaultHarness) -> None:
    def find_spare(*, has_rank: bool) -> GangPod | None:
        spare = target.find_gang_pods().get(2)
        return spare if spare is not None and (spare.rank is not None) is has_rank else None

    with harness.run_job(resources={"spares": 1}) as target:
        waiting = target.await_result(lambda: find_spare(has_rank=False), "the spare")
        kill_pod(harness.nodes, harness.home.namespace, target.find_gang_pods()[1].name)
        training = target.await_result(lambda: find_spare(has_rank=True), "ranks of the spare")
        harness.assert_unharmed(target)
        status = target.job.read()["status"]
    assert (training.uid, training.launcher) == (waiting.uid, waiting.launcher)
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (1, 0)


def test_a_first_pod_that_is_killed_is_replaced_alone(harness: FaultHarness) -> None:
    with harness.run_job() as target:
        found = harness.check_recovery(
            target, lambda pods: kill_pod(harness.nodes, harness.home.namespace, pods[0].name)
        )
        status = target.job.read()["status"]
    assert (found.new_pods, found.new_launchers, found.new_ranks) == ({0}, {0}, {0, 1})
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (1, 0)


def test_a_node_that_was_cut_off_comes_back_with_its_old_ranks_and_damages_nothing(harness: FaultHarness) -> None:
    """That of the first pod, which commits checkpoints; it sleeps meanwhile, and the volume is within its reach."""

    def cut_off(pods: Mapping[int, GangPod]) -> None:
        hold_launcher(pods[0])
        pause_rank(pods[0])
        harness.nodes.cut_off(pods[0].node)

    harness.spread_operator()
    with harness.run_job() as target:
        old = target.find_gang_pods()[0]
        with harness.without_network(old.node):
            found = measure_recovery(target, cut_off)
            assert is_alive(old.launcher)
            assert old.rank is not None
            assert is_alive(old.rank)
            resume_rank(old)
        harness.assert_unharmed(target)
        status = target.job.read()["status"]
    assert found.lost_steps <= found.steps_at_risk
    assert found.new_pods == {0}
    assert status["lastFailure"]["reason"] == "NodeLost"
    assert (status["restarts"]["total"], status["restarts"]["pods"], status["restarts"]["preemptions"]) == (0, 1, 1)


@in_full
def test_a_newest_checkpoint_that_is_damaged_is_passed_over(harness: FaultHarness) -> None:
    with harness.run_job() as target:
        target.await_checkpoint(2 * EVERY)
        newest, path = max(target.run.checkpoints().items())
        damage_checkpoint(path)
        found = measure_recovery(target, lambda pods: kill_rank(pods[1]))
        harness.assert_unharmed(target)
    assert (newest, found.first_after.step) == (2 * EVERY, EVERY + 1)
    assert (found.new_pods, found.new_ranks) == (set(), {0, 1})


@in_full
def test_an_operator_that_is_killed_with_a_pod_answers_for_it_once_it_is_back(harness: FaultHarness) -> None:
    with harness.run_job() as target:
        found = harness.check_recovery(
            target, lambda pods: kill_operator_and_pod(harness.nodes, harness.home.namespace, pods[1].name)
        )
        status = target.job.read()["status"]
    assert found.new_pods == {1}
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (1, 0)


# --- all else ---------------------------------------------------------------------------------------------------------


@in_full
def test_a_pod_whose_processes_are_all_killed_is_replaced_alone(harness: FaultHarness) -> None:
    with harness.run_job() as target:
        found = harness.check_recovery(target, lambda pods: kill_processes(pods[1]))
        status = target.job.read()["status"]
    assert (found.new_pods, found.new_launchers, found.new_ranks) == ({1}, {1}, {0, 1})
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (1, 0)
    assert (status["lastFailure"]["reason"], status["lastFailure"]["exitCode"]) == ("PodFailed", 137)


@in_full
def test_a_rank_whose_memory_runs_out_is_started_again_and_the_status_says_why(harness: FaultHarness) -> None:
    with harness.run_job(resources={"memory": "4Gi"}) as target:
        found = harness.check_recovery(
            target, lambda pods: exhaust_memory(harness.nodes, harness.home.namespace, pods[1])
        )
        status = target.job.read()["status"]
    assert (found.new_pods, found.new_launchers, found.new_ranks) == (set(), set(), {0, 1})
    assert "out of memory" in status["lastFailure"]["message"]


@in_full
def test_a_rank_that_hangs_is_started_again(harness: FaultHarness) -> None:
    with harness.run_job(lifecycle={"progressDeadlineSeconds": 30}) as target:
        found = harness.check_recovery(target, lambda pods: pause_rank(pods[1]))
        status = target.job.read()["status"]
    assert (found.new_pods, found.new_launchers, found.new_ranks) == (set(), set(), {0, 1})
    assert status["lastFailure"]["reason"] == "Hung"


@in_full
def test_a_pod_that_is_drained_saves_first_and_takes_no_other_with_it(harness: FaultHarness) -> None:
    with harness.run_job() as target:
        node = target.find_gang_pods()[1].node
        try:
            found = harness.check_recovery(target, lambda _: drain_node(harness.nodes, node, target.job.name))
        finally:
            harness.nodes.plane.kubectl("uncordon", node)
        status = target.job.read()["status"]
    assert (found.new_pods, found.lost_steps) == ({1}, 0)
    assert (status["restarts"]["preemptions"], status["lastFailure"]["reason"]) == (1, "Preempted")


@in_full
def test_a_volume_that_is_full_fails_the_job_with_the_fix_and_keeps_what_was_saved(harness: FaultHarness) -> None:
    with harness.run_job(storage={"storageClass": StorageClass.SIZED.value, "size": "1Gi"}) as target:
        target.await_checkpoint(EVERY)
        # The step after the one in which it was saved tells of it.
        target.job.await_steps(2)
        with standing_still(target.find_gang_pods()[1]):
            until(target.job.has_reported_checkpoint, waiting_for=target.job.describe)
            fill_volume(target.run.folder)
        until(lambda: target.job.phase == "Failed", waiting_for=target.job.describe)
        status = target.job.read()["status"]
        kept = target.run.checkpoints()
    assert status["lastFailure"]["reason"] == "BadConfiguration"
    # It is seen before a checkpoint is begun, or in the middle of one.
    assert re.search(r"free .+, or make it (so much )?larger", status["lastFailure"]["message"])
    [failed] = (said["message"] for said in status["conditions"] if said["type"] == "Failed")
    assert f"resumeFrom: pvc://{target.job.name}-storage/{target.job.name}" in failed
    assert kept


@in_full
def test_an_operator_that_is_killed_with_the_first_pod_replaces_it_alone_once_it_is_back(harness: FaultHarness) -> None:
    with harness.run_job() as target:
        found = harness.check_recovery(
            target, lambda pods: kill_operator_and_pod(harness.nodes, harness.home.namespace, pods[0].name)
        )
        status = target.job.read()["status"]
    assert found.new_pods == {0}
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (1, 0)


@in_full
def test_a_rank_that_is_killed_beside_a_dead_kubelet_is_started_again_in_its_pod(harness: FaultHarness) -> None:
    with harness.run_job() as target:
        node = target.find_gang_pods()[1].node
        try:
            harness.nodes.nodes[node].kubelet.stop()
            found = measure_recovery(target, lambda pods: kill_rank(pods[1]))
        finally:
            harness.nodes.start_kubelet(node)
        harness.assert_unharmed(target)
        status = target.job.read()["status"]
    assert found.lost_steps <= found.steps_at_risk
    assert (found.new_pods, found.new_launchers, found.new_ranks) == (set(), set(), {0, 1})
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (0, 0)


@in_full
def test_a_rank_that_is_killed_without_an_api_server_is_started_again_in_its_pod(harness: FaultHarness) -> None:
    with harness.run_job() as target:

        def kill_unseen(pods: Mapping[int, GangPod]) -> None:
            harness.nodes.plane.stop(Component.API_SERVER)
            try:
                kill_rank(pods[1])
                target.await_start(1)
            finally:
                harness.nodes.plane.start(Component.API_SERVER)

        found = harness.check_recovery(target, kill_unseen)
    assert (found.new_pods, found.new_launchers, found.new_ranks) == (set(), set(), {0, 1})


@in_full
def test_a_checkpoint_that_vanishes_while_it_is_written_costs_what_it_would_have_kept(harness: FaultHarness) -> None:
    with harness.run_job() as target:

        def remove_unfinished(_: Mapping[int, GangPod]) -> None:
            shutil.rmtree(
                target.await_result(
                    lambda: next(iter(target.run.unfinished_checkpoints()), None), "a checkpoint that is being written"
                )
            )

        found = harness.check_recovery(target, remove_unfinished)
    assert (found.new_pods, found.new_launchers) == (set(), set())


@in_full
def test_a_clock_that_is_wrong_in_one_pod_changes_nothing(harness: FaultHarness, tmp_path: Path) -> None:
    """One hour back, then a rank is killed: who is newer and who is silent is not asked of clocks."""
    library = harness.put_file(find_faketime(print))
    start_file = tmp_path / "sitecustomize.py"
    start_file.write_text(RELATIVE_SLEEP)
    harness.put_file(start_file)
    env = [
        {"name": "OMP_NUM_THREADS", "value": "1"},
        {"name": "LD_PRELOAD", "value": f"/claims/{MODELS}/{library.name}"},
        {"name": "FAKETIME_TIMESTAMP_FILE", "value": SHIFT_FILE},
        {"name": "FAKETIME_NO_CACHE", "value": "1"},
        {"name": "DONT_FAKE_MONOTONIC", "value": "1"},
        {"name": "PYTHONPATH", "value": f"/claims/{MODELS}"},
    ]
    with harness.run_job(resources={"env": env}) as target:
        shift_clock(harness.nodes, harness.home.namespace, target.find_gang_pods()[1].name, "-1h")
        found = harness.check_recovery(target, lambda pods: kill_rank(pods[1]))
    assert (found.new_pods, found.new_launchers, found.new_ranks) == (set(), set(), {0, 1})
