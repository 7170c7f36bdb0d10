"""Jobs that get faults: a model that takes time to load, and what a job learns undisturbed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from builders import merged
from cluster.control_plane.releases import Release
from cluster.nodes.cluster import Cluster
from cluster.nodes.pods import claim
from cluster.nodes.recovery import Member, Patient, Recovery, patient, recovery
from cluster.nodes.training import ROOT, TRAINER_PYTHON, Job, example, run_here, submitted
from cluster.nodes.watch_recorder import Witness, witness
from cluster.waiting import until

RANDOM_MODEL = ROOT / "tests/trainer/random_model.py"
MODELS = "models"
STEPS, EVERY = 16, 4
# A fault comes that many steps after a checkpoint, so that there is something to lose.
STEPS_AT_RISK = 2


@dataclass(frozen=True)
class Ward:
    """Takes jobs in. `calm` is the loss of every step of one that nothing is done to."""

    nodes: Cluster
    home: Release
    calm: Mapping[int, float]
    witness: Witness
    _numbers: Iterator[int]

    @contextmanager
    def job(self, **changed: Any) -> Iterator[Patient]:
        """A job over both nodes in the midst of its training, and its end in any case."""
        name = f"patient-{next(self._numbers)}"
        of = in_cluster(job_of(f"pvc://{MODELS}/random", len(self.calm)))
        body = merged(of, {"metadata": {"name": name}, "spec": changed})
        admitted = patient(submitted(self.nodes, self.home.namespace, body), self.witness)
        try:
            admitted.await_checkpoint(EVERY)
            admitted.await_risk(EVERY, STEPS_AT_RISK)
            yield admitted
        finally:
            admitted.dismiss()

    def recovered(self, patient: Patient, fault: Callable[[Mapping[int, Member]], object]) -> Recovery:
        """Return what came of a fault, once the job has ended well and has learned what it learns without."""
        found = recovery(patient, fault)
        assert found.lost_steps <= found.steps_at_risk
        self.assert_unharmed(patient)
        return found

    @contextmanager
    def without_network(self, node: str) -> Iterator[None]:
        """While a node may be cut off; afterwards it is not."""
        try:
            yield
        finally:
            self.nodes.reconnect(node)
            self.nodes.await_ready(node)

    def provide(self, file: Path) -> Path:
        """Put a file where pods find it; where the machine sees it there."""
        place = self.nodes.storage.path(self.home.namespace, MODELS) / file.name
        shutil.copy(file, place)
        place.chmod(0o755)
        return place

    def spread_operator(self) -> None:
        """One replica on each node: earlier faults may have left both on one."""
        while self.operator_nodes() != {*self.nodes.nodes}:
            self.replace_replica()

    def replace_replica(self) -> None:
        """One replica of the operator goes, and another comes."""
        name = self._replicas()[0]["metadata"]["name"]
        self.nodes.plane.kubectl("delete", "pod", name, f"--namespace={self.home.namespace}")
        self.await_operator()

    def operator_nodes(self) -> set[str]:
        """Return where replicas of the operator are."""
        return {pod["spec"]["nodeName"] for pod in self._replicas()}

    def await_operator(self) -> None:
        """Return when every replica is ready."""
        self.nodes.plane.kubectl(
            "rollout", "status", "deployment/moejob-operator", "--timeout=120s", f"--namespace={self.home.namespace}"
        )

    def _replicas(self) -> list[Any]:
        pods = self.home.get("pods")["items"]
        named = [pod for pod in pods if pod["metadata"]["name"].startswith("moejob-operator-")]
        return [pod for pod in named if "deletionTimestamp" not in pod["metadata"]]

    def assert_unharmed(self, patient: Patient) -> None:
        """The job ends well, and every step has the loss of the undisturbed run, however often it was done."""
        patient.job.await_end()
        told = patient.lines()
        assert {line.step for line in told} == set(self.calm)
        assert [line.loss for line in told] == pytest.approx([self.calm[line.step] for line in told], rel=1e-6)


def job_of(model: str, steps: int) -> Job:
    """Two ranks that share the experts of a model, with a checkpoint every few seconds."""
    job = example()
    spec = {
        "model": {"source": model},
        "data": {"eval": None, "maxLength": 64},
        "training": {"maxSteps": steps, "evalEvery": None},
        "checkpoint": {"everySteps": EVERY, "exportHuggingFace": False},
        "storage": {"accessModes": ["ReadWriteMany"]},
        "lifecycle": {"progressDeadlineSeconds": 300},
    }
    return merged(job, {"spec": spec})


def in_cluster(job: Job) -> Job:
    """The same as two pods, which one node can hold when it has to."""
    # As many threads as the undisturbed run has: sums in another order differ more with every step.
    env = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    return merged(job, {"spec": {"resources": {"gpusPerNode": 1, "cpu": "200m", "env": env}}})


@contextmanager
def ward(nodes: Cluster, home: Release, folder: Path, steps: int = STEPS) -> Iterator[Ward]:
    """The model is written, put on a volume and trained once without a cluster."""
    subprocess.run([TRAINER_PYTHON, RANDOM_MODEL, folder / "random"], check=True, capture_output=True)
    calm = run_here(job_of(str(folder / "random"), steps), folder).losses()
    _provide(nodes, home.namespace, folder / "random")
    with witness(nodes.plane.api, home.namespace) as listening:
        yield Ward(nodes, home, calm, listening, count())


def _provide(nodes: Cluster, namespace: str, model: Path) -> None:
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    nodes.plane.api.create(claims, claim(MODELS, "1Gi", None))
    until(
        lambda: nodes.plane.api.get(f"{claims}/{MODELS}")["status"].get("phase") == "Bound",
        waiting_for=f"a volume for {MODELS}",
    )
    place = nodes.storage.path(namespace, MODELS) / model.name
    shutil.copytree(model, place)
    # The users of pods are no users of this machine.
    for file in place.iterdir():
        file.chmod(0o644)
