"""What is done to a job in the midst of its training, on two real nodes, and what becomes of it.

MOEJOB_FAULTS=full does everything; otherwise it is what happens to every cluster sooner or later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import pytest

from cluster.control_plane.releases import Release
from cluster.nodes.cluster import Cluster
from cluster.nodes.faults import damage, is_alive, kill_operator, kill_pod, kill_rank
from cluster.nodes.recovery import Member, checkpoints, recovery
from cluster.nodes.training import installed
from cluster.nodes.ward import EVERY, Ward, ward
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
        cut_off = patient.members()[0]
        with sick.without_network(cut_off.node):
            found = recovery(patient, lambda _: sick.nodes.cut_off(cut_off.node))
            assert is_alive(cut_off.launcher), "the ranks that nobody sees have ended too early to do any damage"
        sick.assert_unharmed(patient)
        status = patient.job.read()["status"]
    assert found.lost_steps <= found.steps_at_risk
    assert found.new_pods == {0, 1}
    assert (status["restarts"]["total"], status["restarts"]["preemptions"]) == (1, 1)
    assert status["lastFailure"]["reason"] == "NodeLost"


def test_a_newest_checkpoint_that_is_damaged_is_passed_over(sick: Ward) -> None:
    with sick.job() as patient:
        patient.await_checkpoint(2 * EVERY)
        newest, path = max(checkpoints(patient.folder).items())
        damage(path)
        found = recovery(patient, lambda pods: kill_rank(pods[1]))
        sick.assert_unharmed(patient)
    assert (newest, found.first_after.step) == (2 * EVERY, EVERY + 1)
    assert (found.new_pods, found.new_ranks) == (set(), {0, 1})


def test_an_operator_that_is_killed_with_a_pod_answers_for_it_once_it_is_back(sick: Ward) -> None:
    def kill_both(pods: Mapping[int, Member]) -> None:
        kill_operator(sick.nodes, sick.home.namespace)
        kill_pod(sick.nodes, sick.home.namespace, pods[1].name)

    with sick.job() as patient:
        found = sick.recovered(patient, kill_both)
        status = patient.job.read()["status"]
    assert found.new_pods == {1}
    assert (status["restarts"]["pods"], status["restarts"]["total"]) == (1, 0)
