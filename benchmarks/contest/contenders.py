"""Who is measured: how each operator is started, what its jobs look like, and where it says how long it looks at one.

Each has a namespace of its own and is the only one that looks there.
"""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contest.costs import Costs, costs
from benchmarks.contest.histograms import Histogram, histogram
from cluster.binaries import PEERS
from cluster.control_plane import jobs
from cluster.control_plane.operators import ACCOUNT, Home, free_port, grant
from cluster.control_plane.plane import ControlPlane
from cluster.processes import Process
from cluster.waiting import until
from moejob_api.contract import Label

Body = dict[str, Any]

GPUS_PER_POD = 8
START_SECONDS = 120
OURS = "moejob"
# The released command cannot be told another limit; its own is 20 requests a second.
UNLIMITED, RELEASED = "Kubeflow, no client limit", "Kubeflow as released"
_KUBEFLOW_ACCOUNT = "training-operator"


@dataclass(frozen=True)
class Contender:
    """One operator that runs. `timed` names the histogram of its looks, and the label of those that count."""

    name: str
    namespace: str
    user: str
    collection: str
    label: str
    body: Callable[[str, int], Body]
    process: Process
    port: int
    timed: tuple[str, str]

    def costs(self) -> Costs:
        """What its process has taken until now."""
        if self.process.pid is None:
            raise RuntimeError(f"{self.name} has ended; its log is {self.process.log}")
        return costs(self.process.pid)

    def said(self) -> str:
        """Its metrics; nothing while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return ""

    def metric(self, name: str) -> float:
        """A number that it says of itself; KeyError where it does not."""
        return float(dict(line.rsplit(" ", 1) for line in self.said().splitlines() if line[:1] != "#")[name])

    def looks(self) -> Histogram:
        """How long it has looked at jobs until now."""
        return histogram(self.said(), *self.timed)


def ours(plane: ControlPlane, namespace: str) -> Contender:
    """The operator of this tree under the chart's own account and settings; its rights end with the control plane."""
    home = Home(plane, plane.helm.rendered(None, namespace), namespace, plane.folder)
    grant(home)
    operator = home.replica()
    contender = Contender(
        name=OURS,
        namespace=home.namespace,
        user=f"system:serviceaccount:{home.namespace}:{ACCOUNT}",
        collection=jobs.path(home.namespace).partition("?")[0],
        label=Label.JOB.value,
        body=_our_job,
        process=operator.process,
        port=operator.port,
        timed=("moejob_reconcile_seconds", 'outcome="done"'),
    )
    operator.start()
    home.leader(START_SECONDS)
    return contender


def kubeflow(plane: ControlPlane, program: Path, name: str, namespace: str) -> Contender:
    """Kubeflow's training-operator for PyTorchJobs of one namespace."""
    plane.kubectl("create", "serviceaccount", _KUBEFLOW_ACCOUNT, f"--namespace={namespace}")
    account = f"{namespace}:{_KUBEFLOW_ACCOUNT}"
    plane.kubectl(
        "create", "clusterrolebinding", namespace, "--clusterrole=cluster-admin", f"--serviceaccount={account}"
    )
    port = free_port()
    flags = [
        f"--kubeconfig={plane.service_account_kubeconfig(namespace, _KUBEFLOW_ACCOUNT)}",
        f"--namespace={namespace}",
        f"--metrics-bind-address=127.0.0.1:{port}",
        *(["--qps=-1", "--controller-threads=16"] if name == UNLIMITED else []),
    ]
    contender = Contender(
        name=name,
        namespace=namespace,
        user=f"system:serviceaccount:{account}",
        collection=f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs",
        label="training.kubeflow.org/job-name",
        body=_pytorch_job,
        process=Process(f"training-operator-{namespace}", [program, *flags], plane.folder),
        port=port,
        timed=("controller_runtime_reconcile_time_seconds", 'controller="pytorchjob-controller"'),
    )
    contender.process.start()
    contender.process.wait_until(
        lambda: "controller_runtime_max_concurrent_reconciles" in contender.said(), START_SECONDS
    )
    return contender


def define_pytorch_jobs(plane: ControlPlane) -> None:
    """The definition that comes with the module."""
    asked = ["go", "list", "-m", "-f", "{{.Dir}}", PEERS.pins]
    folder = subprocess.run(asked, cwd=PEERS.folder, capture_output=True, text=True, check=True).stdout.strip()
    definition = Path(folder) / "manifests/base/crds/kubeflow.org_pytorchjobs.yaml"
    # Too large for the annotation that a client-side apply leaves.
    plane.kubectl("apply", "--server-side", "-f", definition)
    until(lambda: _is_served(plane, "pytorchjobs"), seconds=START_SECONDS, waiting_for="PyTorchJobs to be served")


def define_our_jobs(plane: ControlPlane, definition: Path) -> None:
    """The definition of this tree."""
    plane.kubectl("apply", "--server-side", "-f", definition)
    until(lambda: _is_served(plane, "moetrainingjobs"), seconds=START_SECONDS, waiting_for="our jobs to be served")


def _is_served(plane: ControlPlane, plural: str) -> bool:
    return plural in plane.kubectl("api-resources", "--output=name", "--cached=false")


def _our_job(name: str, pods: int) -> Body:
    """As much as a PyTorchJob has: no volume of its own, no gang object."""
    data = pods * GPUS_PER_POD // 16
    return jobs.body(
        name,
        parallelism={"tensor": 4, "expert": 4, "data": data},
        training={"globalBatchSize": 16 * data},
        resources={"gpusPerNode": GPUS_PER_POD, "gpuType": "H100"},
        storage={"size": None, "claimName": "checkpoints"},
        lifecycle={"gang": "None"},
    )


def _pytorch_job(name: str, pods: int) -> Body:
    container = {
        "name": "pytorch",
        "image": "trainer",
        "command": ["python3", "train.py"],
        "resources": {"limits": {"nvidia.com/gpu": str(GPUS_PER_POD)}},
    }
    replica = {"restartPolicy": "OnFailure", "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "pytorchReplicaSpecs": {"Master": replica | {"replicas": 1}, "Worker": replica | {"replicas": pods - 1}},
            "runPolicy": {"cleanPodPolicy": "None"},
        },
    }
