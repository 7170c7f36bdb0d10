"""A job with a template of its pods on two real nodes: a sidecar, a volume, a device and an affinity, through a fault.

Scripts that know torchrun's variables alone run in its pods, too.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from builders import merge_sections
from cluster.control_plane.releases import Release
from cluster.nodes.cluster import Cluster
from cluster.nodes.faults import kill_pod
from cluster.nodes.training import (
    TRAINING_SECONDS,
    VERSION,
    Job,
    SubmittedJob,
    over_two_nodes,
    read_example,
    submit_job,
)
from cluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 15
DEVICE = "example.com/dongle"
SCRATCH = {"name": "scratch", "mountPath": "/scratch"}
CHRONICLE = "while sleep 0.2; do date +%s >>/scratch/chronicle; done"
# Sums the ranks over the group that torch makes of torchrun's variables.
SUM_RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(ranks)
print(dist.get_rank(), dist.get_world_size(), int(ranks))
dist.barrier()
dist.destroy_process_group()
"""


def job_with_template() -> Job:
    """Two ranks on a node each, beside whatever platform engineers put into pods."""
    place = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1", "node-2"]}
    template = {
        "metadata": {"labels": {"example.com/team": "platform"}},
        "spec": {
            "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "16Mi"}}],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [place]}]
                    }
                }
            },
            "containers": [
                {"name": "trainer", "volumeMounts": [SCRATCH], "resources": {"limits": {DEVICE: "1"}}},
                {
                    "name": "chronicler",
                    "image": f"moejob-trainer-cpu:{VERSION}",
                    "command": ["sh", "-c", CHRONICLE],
                    "volumeMounts": [SCRATCH],
                },
            ],
        },
    }
    changes = {
        "metadata": {"name": "templated"},
        "spec": {
            "training": {"maxSteps": STEPS},
            "checkpoint": {"everySteps": 5},
            "podTemplate": {"trainer": template},
        },
    }
    return merge_sections(over_two_nodes(read_example()), changes)


@pytest.fixture(scope="module")
def templated_job(nodes: Cluster, home: Release) -> Iterator[SubmittedJob]:
    """The job, on nodes that have a device each."""
    devices = {DEVICE: "1"}
    for node in nodes.nodes:
        nodes.plane.api.merge(f"/api/v1/nodes/{node}/status", {"status": {"capacity": devices, "allocatable": devices}})
    job = submit_job(nodes, home.namespace, job_with_template())
    try:
        yield job
    finally:
        nodes.plane.kubectl("delete", "moetrainingjob", job.name, f"--namespace={job.namespace}")


def run_in_pods(job: SubmittedJob, script: str) -> list[str]:
    """Run a script in all trainer pods at once, and return what each printed."""
    at = f"--namespace={job.namespace}"
    started = [
        subprocess.Popen(
            job.nodes.plane.kubectl_command("exec", pod, at, "--container=trainer", "--", "python", "-c", script),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for pod in sorted(job.pod_nodes())
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert not any(process.returncode for process in started), outputs
    return [output.strip() for output, _ in outputs]


def test_pods_have_what_the_template_says_and_ranks_train_beside_it(templated_job: SubmittedJob) -> None:
    until(lambda: templated_job.phase == "Running", seconds=TRAINING_SECONDS, waiting_for=templated_job.describe)
    templated_job.await_steps(1)
    pods = templated_job.list_pods()
    assert [pod["metadata"]["labels"]["example.com/team"] for pod in pods] == ["platform"] * 2
    assert [pod["spec"]["containers"][0]["resources"]["limits"][DEVICE] for pod in pods] == ["1"] * 2
    at = f"--namespace={templated_job.namespace}"
    for pod in templated_job.pod_nodes():
        read = ("exec", pod, at, "--container=trainer", "--", "cat", "/scratch/chronicle")
        assert templated_job.nodes.plane.kubectl(*read).split()


def test_a_script_that_knows_torchruns_variables_alone_meets_over_the_pods(templated_job: SubmittedJob) -> None:
    assert run_in_pods(templated_job, SUM_RANKS) == ["0 2 3", "1 2 3"]


def test_a_pod_with_a_sidecar_that_is_killed_is_replaced_and_the_job_ends_beside_it(
    templated_job: SubmittedJob,
) -> None:
    job = templated_job
    until(lambda: job.run().checkpoints(), waiting_for=job.describe)
    before = job.pod_uids()
    lost_pod = max(before)
    kill_pod(job.nodes, job.namespace, lost_pod)
    # A sidecar that never ends by itself ends with the trainer.
    job.await_end()
    after = job.pod_uids()
    assert {pod for pod in before if before[pod] != after[pod]} == {lost_pod}
    assert job.run().last_step() == STEPS
    assert job.read()["status"]["restarts"]["pods"] == 1
    assert {pod["status"]["phase"] for pod in job.list_pods()} == {"Succeeded"}
