"""Stacks of ranks and files of a run on two real nodes: by exec into a pod of the job, then by a pod that reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.control_plane.releases import Release
from cluster.nodes.cluster import Cluster
from cluster.nodes.training import Job, SubmittedJob, over_two_nodes, read_example, submit_job
from cluster.waiting import until
from moejob_client.job_volume import READER_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def steered_job() -> Job:
    job = over_two_nodes(read_example())
    job["metadata"]["name"] = "steered"
    job["spec"]["data"] |= {"maxLength": 64}
    job["spec"]["training"] |= {"maxSteps": 40, "evalEvery": 40}
    return job


def run_verb(job: SubmittedJob, *arguments: str) -> str:
    """Run a verb that has to end well, and return its output."""
    command = [sys.executable, "-m", "moejob_cli", *arguments, "-n", job.namespace]
    environment = {"KUBECONFIG": str(job.nodes.plane.kubeconfig)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_folder(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def list_readers(job: SubmittedJob) -> list[str]:
    query = f"labelSelector={READER_LABEL}={job.name}"
    pods = job.nodes.plane.api.get(f"/api/v1/namespaces/{job.namespace}/pods?{query}")["items"]
    return [pod["metadata"]["name"] for pod in pods]


def test_stacks_and_files_come_through_a_real_kubelet(nodes: Cluster, home: Release, tmp_path: Path) -> None:
    job = submit_job(nodes, home.namespace, steered_job())
    until(lambda: job.phase == "Running", seconds=600, waiting_for=job.describe)
    until(lambda: job.run().last_step() >= 2, seconds=600, waiting_for=job.describe)
    uids = job.pod_uids()
    ranks = [json.loads(line) for line in run_verb(job, "stacks", "steered", "-o", "json").splitlines()]
    assert [(each["rank"], each["problem"]) for each in ranks] == [(0, ""), (1, "")]
    assert {each["node"] for each in ranks} == {"node-1", "node-2"}
    assert all(any(" in main" in line for line in each["lines"]) for each in ranks)
    assert json.loads(run_verb(job, "top", "steered", "-o", "json"))["lastStep"]["step"] >= 2
    assert list_readers(job) == []
    job.await_end()
    # No rank was hurt: each step is done once, in the first pods.
    assert job.run().steps() == [(0, 0, step) for step in range(1, 41)]
    assert set(job.pod_uids().values()) <= set(uids.values())

    shown = [json.loads(line) for line in run_verb(job, "steps", "steered", "-o", "json").splitlines()]
    assert shown == job.run().read_step_log()
    run_verb(job, "export", "steered", "--out", str(tmp_path / "model"))
    export = job.run().folder / "export"
    assert read_folder(tmp_path / "model") == read_folder(export)
    assert list_readers(job) == []
