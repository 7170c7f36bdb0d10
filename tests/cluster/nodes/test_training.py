"""A job over two real nodes, by chart, webhook, operator image and trainer image, learns what it learns without."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.control_plane.plane import KubectlError
from cluster.control_plane.releases import Release
from cluster.nodes.cluster import Cluster
from cluster.nodes.training import Job, SubmittedJob, over_two_nodes, read_example, run_here, submit_job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 12


def short_job() -> Job:
    """Two ranks that share the experts, on a node each."""
    job = over_two_nodes(read_example())
    job["spec"]["data"] |= {"maxLength": 64}
    job["spec"]["training"] |= {"maxSteps": STEPS, "evalEvery": STEPS}
    job["spec"]["checkpoint"] |= {"everySteps": 6}
    # All numbers are the plan's, and limits: a number that is too small ends the run.
    job["spec"]["resources"] = {"accelerator": "CPU", "gpusPerNode": 1, "qosClass": "Guaranteed"}
    return job


@pytest.fixture(scope="module")
def trained(nodes: Cluster, home: Release) -> SubmittedJob:
    """The job, at its good end."""
    job = submit_job(nodes, home.namespace, short_job())
    job.await_end()
    return job


def test_the_operator_runs_on_both_nodes_under_the_restricted_standard(home: Release) -> None:
    pods = [pod for pod in home.get("pods")["items"] if pod["metadata"]["name"].startswith("moejob-operator-")]
    assert {pod["spec"]["nodeName"] for pod in pods} == {"node-1", "node-2"}
    assert all(pod["status"]["containerStatuses"][0]["ready"] for pod in pods)


@pytest.mark.usefixtures("home")
def test_the_webhook_refuses_a_job_that_can_not_be_laid_out(nodes: Cluster, namespace: str) -> None:
    job = short_job()
    job["spec"]["parallelism"] = {"expert": 3}
    with pytest.raises(KubectlError, match="denied the request"):
        submit_job(nodes, namespace, job)


def test_a_job_runs_on_both_nodes_to_its_end(trained: SubmittedJob) -> None:
    assert sorted(trained.pod_nodes().values()) == ["node-1", "node-2"]
    assert {pod["status"]["qosClass"] for pod in trained.list_pods()} == {"Guaranteed"}
    status = trained.read()["status"]
    assert status["restarts"]["total"] == 0
    assert status["progress"]["step"] == STEPS
    assert status["progress"]["lastCheckpointStep"] == STEPS


def test_transformers_see_in_the_export_what_was_trained(trained: SubmittedJob) -> None:
    run = trained.run()
    assert run.exported_loss() == pytest.approx(run.last_evaluation(), rel=1e-5)


def test_a_cluster_changes_no_loss(trained: SubmittedJob, tmp_path: Path) -> None:
    in_cluster, here = trained.run(), run_here(short_job(), tmp_path)
    assert list(in_cluster.losses()) == list(range(1, STEPS + 1))
    assert in_cluster.losses() == pytest.approx(here.losses(), rel=1e-6)
    assert in_cluster.losses()[STEPS] < in_cluster.losses()[1]
