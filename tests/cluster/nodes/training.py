"""Training jobs on the nodes: the images of this tree, the chart, a job from its file to its end, what it left."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.control_plane.releases import Release, release
from cluster.nodes.cluster import Cluster
from cluster.waiting import until
from images import built

ROOT = Path(__file__).parents[3]
VERSION = (ROOT / "VERSION").read_text().strip()
MOEJOB = ROOT / ".venv/operator/bin/moejob"
TRAINER_PYTHON = ROOT / ".venv/trainer/bin/python"
HELD_OUT_LOSS = ROOT / "tests/trainer/held_out_loss.py"
JOBS = "/apis/moejob.dev/v1alpha1/namespaces/{}/moetrainingjobs"
IMAGES = ("operator", "trainer-cpu")
# Imports alone take a minute where two nodes read torch from one disk for the first time.
TRAINING_SECONDS = 900
ENDS = {"Succeeded", "Failed"}
Job = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """What a job leaves: on a volume of the cluster, or in a folder of `moejob run`."""

    folder: Path

    def losses(self) -> dict[int, float]:
        """Of every step."""
        return {line["step"]: line["loss"] for line in self._lines()}

    def last_evaluation(self) -> float:
        """The loss on what was held out, after the last step."""
        loss: float = self._lines()[-1]["evalLoss"]
        return loss

    def exported_loss(self) -> float:
        """The same, as Transformers see it that load the export."""
        [corpus] = [report.parent for report in self.folder.glob("data/*/report.json") if _split(report) == "test"]
        return float(_said(TRAINER_PYTHON, HELD_OUT_LOSS, self.folder / "export", corpus))

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "steps.jsonl").read_text().splitlines()]


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job in the cluster."""

    nodes: Cluster
    namespace: str
    name: str

    def read(self) -> Job:
        """The job as it is now."""
        job: Job = self.nodes.plane.api.get(f"{JOBS.format(self.namespace)}/{self.name}")
        return job

    @property
    def phase(self) -> str:
        return str(self.read().get("status", {}).get("phase", ""))

    def await_end(self) -> None:
        """Return when it has succeeded; when it has not, say what the job and its pods said last."""
        until(lambda: self.phase in ENDS, seconds=TRAINING_SECONDS, waiting_for=self.told)
        assert self.phase == "Succeeded", self.told()

    def pods(self) -> dict[str, str]:
        """The pods of the job, and the node of each."""
        found = self.nodes.plane.api.get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        names = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in found}
        return {name: node for name, node in names.items() if name.startswith(f"{self.name}-")}

    def run(self) -> Run:
        """What it left on its volume."""
        [claim] = self.nodes.plane.api.get(f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims")["items"]
        return Run(self.nodes.storage.path(self.namespace, claim["metadata"]["name"]) / self.name)

    def told(self) -> str:
        """Everything there is to say."""
        at = f"--namespace={self.namespace}"
        kubectl = self.nodes.plane.kubectl
        logs = [kubectl("logs", pod, at, "--tail=20") for pod in self.pods()]
        return "\n".join([kubectl("get", "moetrainingjobs,pods,events", at), json.dumps(self.read()["status"]), *logs])


@contextmanager
def installed(nodes: Cluster, folder: Path) -> Iterator[Release]:
    """The chart, with the operator and the trainer of this tree on every node; CannotBuildError without them."""
    nodes.load({f"moejob-{name}:{VERSION}": built(name) for name in IMAGES})
    with release(nodes.plane, folder) as made:
        made.install({"images": {"trainer": "moejob-trainer-cpu"}})
        yield made


def over_two_nodes(job: Job) -> Job:
    """A job of two ranks as one of two pods that fit on no node together."""
    spec = job["spec"]
    return job | {"spec": spec | {"resources": spec["resources"] | {"gpusPerNode": 1, "cpu": 1}}}


def example() -> Job:
    """The one that comes with moejob."""
    job: Job = yaml.safe_load((ROOT / "examples" / "tiny-sft.yaml").read_text())
    return job


def submitted(nodes: Cluster, namespace: str, job: Job) -> Submitted:
    """A job, given to the operator."""
    nodes.plane.kubectl("apply", "-f", "-", f"--namespace={namespace}", stdin=yaml.safe_dump(job))
    return Submitted(nodes, namespace, job["metadata"]["name"])


def run_here(job: Job, folder: Path) -> Run:
    """The same job without a cluster, to its end."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    _said(MOEJOB, "run", file, "--run-dir", folder / "run")
    return Run(folder / "run")


def _said(*command: str | Path) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=TRAINING_SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def _split(report: Path) -> str:
    split: str = json.loads(report.read_text())["split"]
    return split
