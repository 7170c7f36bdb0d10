"""What is done to a job in the midst of its training, on two real nodes, and what becomes of it.

MOEJOB_FAULTS=full does everything; otherwise it is what happens to every cluster sooner or later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cluster.control_plane.releases import Release
from cluster.nodes.cluster import Cluster
from cluster.nodes.faults import damage, hold_rank, kill_operator, kill_pod, kill_rank
from cluster.nodes.recovery import checkpoints
from cluster.nodes.training import installed
from cluster.nodes.ward import Ward, ward
from cluster.waiting import until
from images import CannotBuildError

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
in_full = pytest.mark.skipif(os.environ.get("MOEJOB_FAULTS") != "full", reason="make test-faults does this")


@pytest.fixture(scope="module")
def home(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Where the operator runs."""
    try:
        with installed(nodes, tmp_path_factory.mktemp("release")) as made:
            yield made
    except CannotBuildError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def sick(nodes: Cluster, home: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    """Where jobs are taken in."""
    with ward(nodes, home, tmp_path_factory.mktemp("ward")) as opened:
        yield opened


# --- what happens to every cluster --------------------------------------------------------------------------------


def test_a_rank_that_is_killed_is_started_again_in_its_pod(sick: Ward) -> None:
    with sick.job() as patient:
        found = sick.recovered(patient, lambda pods: kill_rank(pods[1]))
        status = patient.job.read()["status"]
    assert (found.new_pods, found.new_launchers, found.new_ranks) == (set(), set(), {0, 1})
    assert (status["restarts"]["ranks"], status["restarts"]["pods"], status["restarts"]["total"]) == (1, 0, 0)
    assert status["lastFailure"]["reason"] == "RankFailed"


def test_a_pod_that_is_killed_is_replaced_alone(sick: Ward) -> None:
    with sick.job() as patient:
        found = sick.recovered(patient, lambda pods: kill_pod(sick.nodes, sick.home.namespace, pods[1].name))
        status = patient.job.read()["status"]
    assert (found.new_pods, found.new_launchers, found.new_ranks) == ({1}, {1}, {0, 1})
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (1, 0)


def test_a_node_that_was_cut_off_comes_back_with_its_old_ranks_and_damages_nothing(sick: Ward) -> None:
    """That of the first pod: it has all that a rank needs to go on writing, and the volume is within its reach."""
    with sick.job() as patient:
        node = patient.members()[0].node
        try:
            found = sick.recovered(patient, lambda pods: sick.nodes.cut_off(node))
        finally:
            sick.nodes.reconnect(node)
            sick.nodes.await_ready(node)
        status = patient.job.read()["status"]
    assert found.new_pods == {0, 1}
    assert (status["restarts"]["total"], status["restarts"]["preemptions"]) == (1, 1)
    assert status["lastFailure"]["reason"] == "NodeLost"


def test_a_newest_checkpoint_that_is_damaged_is_passed_over(sick: Ward) -> None:
    with sick.job() as patient:
        patient.await_checkpoint(8)
        newest = checkpoints(patient.folder)
        damage(newest[max(newest)])
        kill_rank(patient.members()[1])


def test_an_operator_that_is_killed_with_a_pod_answers_for_it_when_it_is_back(sick: Ward) -> None:
    with sick.job() as patient:

        def both(pods):
            kill_operator(sick.nodes, sick.home.namespace)
            kill_pod(sick.nodes, sick.home.namespace, pods[1].name)

        found = sick.recovered(patient, both)
        status = patient.job.read()["status"]
    assert found.new_pods == {1}
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (1, 0)
