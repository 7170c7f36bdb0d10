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

from builders import merge_sections
from cluster.control_plane.releases import Release
from cluster.nodes.cluster import Cluster
from cluster.nodes.pods import build_claim
from cluster.nodes.recovery import GangPod, Recovery, TargetJob, await_target_job, measure_recovery
from cluster.nodes.training import ROOT, TRAINER_PYTHON, Job, read_example, run_here, submit_job
from cluster.nodes.watch_recorder import WatchRecorder, record_watches
from cluster.waiting import until

RANDOM_MODEL = ROOT / "tests/trainer/random_model.py"
MODELS = "models"
STEPS, EVERY = 16, 4
# A fault comes that many steps after a checkpoint, so that there is something to lose.
STEPS_AT_RISK = 2


@dataclass(frozen=True)
class FaultHarness:
    """Takes jobs in. `undisturbed_losses` are those of every step of a job that nothing is done to."""

    nodes: Cluster
    home: Release
    undisturbed_losses: Mapping[int, float]
    recorder: WatchRecorder
    _numbers: Iterator[int]

    @contextmanager
    def run_job(self, **changed: Any) -> Iterator[TargetJob]:
        """A job over both nodes in the midst of its training, and its end in any case."""
        name = f"patient-{next(self._numbers)}"
        base_job = fit_to_cluster(build_job(f"pvc://{MODELS}/random", len(self.undisturbed_losses)))
        body = merge_sections(base_job, {"metadata": {"name": name}, "spec": changed})
        target = await_target_job(submit_job(self.nodes, self.home.namespace, body), self.recorder)
        try:
            target.await_checkpoint(EVERY)
            target.await_risk(EVERY, STEPS_AT_RISK)
            yield target
        finally:
            target.delete()

    def check_recovery(self, target: TargetJob, fault: Callable[[Mapping[int, GangPod]], object]) -> Recovery:
        """Return what came of a fault, once the job has ended well and has learned what it learns without."""
        outage = measure_recovery(target, fault)
        assert outage.lost_steps <= outage.steps_at_risk
        self.assert_unharmed(target)
        return outage

    @contextmanager
    def without_network(self, node: str) -> Iterator[None]:
        """While a node may be cut off; afterwards it is not."""
        try:
            yield
        finally:
            self.nodes.reconnect(node)
            self.nodes.await_ready(node)

    def put_file(self, file: Path) -> Path:
        """Put a file where pods find it; where the machine sees it there."""
        place = self.nodes.storage.volume_path(self.home.namespace, MODELS) / file.name
        shutil.copy(file, place)
        place.chmod(0o755)
        return place

    def spread_operator(self) -> None:
        """One replica on each node: earlier faults may have left both on one."""
        while self.operator_nodes() != {*self.nodes.nodes}:
            self.replace_replica()

    def replace_replica(self) -> None:
        """One replica of the operator goes, and another comes."""
        name = self._operator_pods()[0]["metadata"]["name"]
        self.nodes.plane.kubectl("delete", "pod", name, f"--namespace={self.home.namespace}")
        self.await_operator()

    def operator_nodes(self) -> set[str]:
        """Return where replicas of the operator are."""
        return {pod["spec"]["nodeName"] for pod in self._operator_pods()}

    def await_operator(self) -> None:
        """Return when every replica is ready."""
        self.nodes.plane.kubectl(
            "rollout", "status", "deployment/moejob-operator", "--timeout=120s", f"--namespace={self.home.namespace}"
        )

    def _operator_pods(self) -> list[Any]:
        pods = self.home.get("pods")["items"]
        named = [pod for pod in pods if pod["metadata"]["name"].startswith("moejob-operator-")]
        return [pod for pod in named if "deletionTimestamp" not in pod["metadata"]]

    def assert_unharmed(self, target: TargetJob) -> None:
        """The job ends well, and every step has the loss of the undisturbed run, however often it was done."""
        target.job.await_end()
        logged_steps = target.read_steps()
        assert {line.step for line in logged_steps} == set(self.undisturbed_losses)
        assert [line.loss for line in logged_steps] == pytest.approx(
            [self.undisturbed_losses[line.step] for line in logged_steps], rel=1e-6
        )


def build_job(model: str, steps: int) -> Job:
    """Two ranks that share the experts of a model, with a checkpoint every few seconds."""
    job = read_example()
    spec = {
        "model": {"source": model},
        "data": {"eval": None, "maxLength": 64},
        "training": {"maxSteps": steps, "evalEvery": None},
        "checkpoint": {"everySteps": EVERY, "exportHuggingFace": False},
        "storage": {"accessModes": ["ReadWriteMany"]},
        "lifecycle": {"progressDeadlineSeconds": 300},
    }
    return merge_sections(job, {"spec": spec})


def fit_to_cluster(job: Job) -> Job:
    """The same as two pods, which one node can hold when it has to."""
    # As many threads as the undisturbed run has: sums in another order differ more with every step.
    env = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    return merge_sections(job, {"spec": {"resources": {"gpusPerNode": 1, "cpu": "200m", "env": env}}})


@contextmanager
def start_fault_harness(nodes: Cluster, home: Release, folder: Path, steps: int = STEPS) -> Iterator[FaultHarness]:
    """The model is written, put on a volume and trained once without a cluster."""
    subprocess.run([TRAINER_PYTHON, RANDOM_MODEL, folder / "random"], check=True, capture_output=True)
    undisturbed_losses = run_here(build_job(str(folder / "random"), steps), folder).losses()
    _provide_model(nodes, home.namespace, folder / "random")
    with record_watches(nodes.plane.api, home.namespace) as recorder:
        yield FaultHarness(nodes, home, undisturbed_losses, recorder, count())


def _provide_model(nodes: Cluster, namespace: str, model: Path) -> None:
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    nodes.plane.api.create(claims, build_claim(MODELS, "1Gi", None))
    until(
        lambda: nodes.plane.api.get(f"{claims}/{MODELS}")["status"].get("phase") == "Bound",
        waiting_for=f"a volume for {MODELS}",
    )
    place = nodes.storage.volume_path(namespace, MODELS) / model.name
    shutil.copytree(model, place)
    # The users of pods are no users of this machine.
    for file in place.iterdir():
        file.chmod(0o644)
