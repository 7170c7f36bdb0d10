"""Contenders: the start of each operator, its jobs, and its own measure of the time that it looks at one.

Each has a namespace of its own and is the only one that looks there.
"""

from __future__ import annotations

import ssl
import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contest.costs import Costs, costs
from benchmarks.contest.histograms import Histogram, histogram
from benchmarks.contest.pods import Body, pod_template
from cluster.binaries import PEERS
from cluster.control_plane import jobs
from cluster.control_plane.operators import ACCOUNT, SERVES_ITS_OWN, Home, grant
from cluster.control_plane.plane import ControlPlane
from cluster.processes import Process
from cluster.waiting import until
from moejob_api.contract.pods import Label
from ports import free_port

GPUS_PER_POD = 8
START_SECONDS = 120
OURS = "moejob"
# The released command takes no other limit; its own is 20 requests a second.
UNLIMITED, RELEASED = "Kubeflow, no client limit", "Kubeflow as released"
_KUBEFLOW_ACCOUNT = "training-operator"


@dataclass(frozen=True)
class Contender:
    """One operator that runs.

    It says of itself at `url`, to a client with `token`; `timed` names the histogram of its looks, and the label of
    those that count.
    """

    name: str
    namespace: str
    user: str
    collection: str
    label: str
    body: Callable[[str, int], Body]
    process: Process
    url: str
    timed: tuple[str, str]
    token: str = ""

    def start(self) -> Contender:
        """Run a controller built on controller-runtime, as all peers are, and return when it counts its looks."""
        self.process.start()
        self.process.wait_until(
            lambda: "controller_runtime_max_concurrent_reconciles" in self.metrics_text(), START_SECONDS
        )
        return self

    def costs(self) -> Costs:
        """Return what its process has taken until now."""
        if self.process.pid is None:
            raise RuntimeError(f"{self.name} has ended; its log is {self.process.log}")
        return costs(self.process.pid)

    def metrics_text(self) -> str:
        """Its metrics; nothing while it does not answer."""
        shown = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        asked = urllib.request.Request(f"{self.url}/metrics", headers=shown)  # noqa: S310 - a server of ours
        try:
            with urllib.request.urlopen(asked, timeout=30, context=_anybody()) as answer:  # noqa: S310
                text: str = answer.read().decode()
                return text
        except OSError:
            return ""

    def metric(self, name: str) -> float:
        """A number that it says of itself; KeyError where it does not."""
        return float(dict(line.rsplit(" ", 1) for line in self.metrics_text().splitlines() if line[:1] != "#")[name])

    def looks(self) -> Histogram:
        """Return how long it has looked at jobs until now."""
        return histogram(self.metrics_text(), *self.timed)


def ours(plane: ControlPlane, namespace: str, *, is_traced: bool = False) -> Contender:
    """The operator of this tree under the chart's own account and settings; its rights end with the control plane."""
    home = Home(plane, plane.helm.render(SERVES_ITS_OWN, namespace), namespace, plane.folder)
    grant(home)
    operator = home.replica(*(["--log-level=DEBUG"] if is_traced else []))
    contender = Contender(
        name=OURS,
        namespace=home.namespace,
        user=f"system:serviceaccount:{home.namespace}:{ACCOUNT}",
        collection=jobs.path(home.namespace).partition("?")[0],
        label=Label.JOB.value,
        body=our_job,
        process=operator.process,
        url=f"http://127.0.0.1:{operator.port}",
        timed=("moejob_reconcile_seconds", 'outcome="done"'),
    )
    operator.start()
    home.leader()
    return contender


def kubeflow(plane: ControlPlane, program: Path, name: str, namespace: str) -> Contender:
    """Kubeflow's training-operator for PyTorchJobs of one namespace."""
    user = user_of(plane, namespace, _KUBEFLOW_ACCOUNT)
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
        user=user,
        collection=f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs",
        label="training.kubeflow.org/job-name",
        body=pytorch_job,
        process=Process(f"training-operator-{namespace}", [program, *flags], plane.folder),
        url=f"http://127.0.0.1:{port}",
        timed=("controller_runtime_reconcile_time_seconds", 'controller="pytorchjob-controller"'),
    )
    return contender.start()


def define_pytorch_jobs(plane: ControlPlane) -> None:
    """The definition that comes with the module."""
    asked = ["go", "list", "-m", "-f", "{{.Dir}}", PEERS.pins]
    folder = subprocess.run(asked, cwd=PEERS.folder, capture_output=True, text=True, check=True).stdout.strip()
    definition = Path(folder) / "manifests/base/crds/kubeflow.org_pytorchjobs.yaml"
    define_resource(plane, definition, "pytorchjobs")


def define_resource(plane: ControlPlane, definition: Path, plural: str) -> None:
    """Define a resource, and return when it is there."""
    # Too large for the annotation that a client-side apply leaves.
    plane.kubectl("apply", "--server-side", "-f", definition)

    def is_there() -> bool:
        return plural in plane.kubectl("api-resources", "--output=name", "--cached=false")

    until(is_there, seconds=START_SECONDS, waiting_for=f"{plural} to be served")


def user_of(plane: ControlPlane, namespace: str, account: str) -> str:
    """An account that may do everything: who has how many rights is no part of the contest."""
    plane.kubectl("create", "serviceaccount", account, f"--namespace={namespace}")
    bound = f"--serviceaccount={namespace}:{account}"
    plane.kubectl("create", "clusterrolebinding", namespace, "--clusterrole=cluster-admin", bound)
    return f"system:serviceaccount:{namespace}:{account}"


def our_job(name: str, pods: int) -> Body:
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


def pytorch_job(name: str, pods: int) -> Body:
    """One whose pods are those of ours."""
    replica = {"restartPolicy": "OnFailure", "template": pod_template(our_job(name, pods), "pytorch")}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "pytorchReplicaSpecs": {"Master": replica | {"replicas": 1}, "Worker": replica | {"replicas": pods - 1}},
            "runPolicy": {"cleanPodPolicy": "None"},
        },
    }


def _anybody() -> ssl.SSLContext:
    """For a server on loopback that signs for itself."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
