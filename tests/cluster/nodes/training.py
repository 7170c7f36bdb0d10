"""Training jobs on the nodes: the images of this tree, the chart, a job from its file to its end, what it left."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.control_plane.plane import KubectlError
from cluster.control_plane.releases import Release, release
from cluster.nodes.cluster import Cluster
from cluster.waiting import until
from images import build_image
from moejob_api.contract.pods import Label, PodRole

ROOT = Path(__file__).parents[3]
VERSION = (ROOT / "VERSION").read_text().strip()
MOEJOB = ROOT / ".venv/operator/bin/moejob"
TRAINER_PYTHON = ROOT / ".venv/trainer/bin/python"
HELD_OUT_LOSS = ROOT / "tests/trainer/held_out_loss.py"
JOBS = "/apis/moejob.dev/v1alpha1/namespaces/{}/moetrainingjobs"
IMAGES = ("operator", "trainer-cpu")
VALUES = {"images": {"trainer": "moejob-trainer-cpu"}}
# Imports alone take a minute where two nodes read torch from one disk for the first time.
TRAINING_SECONDS = 900
COMMIT = re.compile(r"step-(\d+)\.(\d+)\.(\d+)")
MARKER = "complete.json"
ENDS = {"Succeeded", "Failed"}
Job = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """The files that a job leaves: on a volume of the cluster, or in a folder of `moejob run`."""

    folder: Path

    def losses(self) -> dict[int, float]:
        """Of every step."""
        return {line["step"]: line["loss"] for line in self.read_step_log()}

    def steps(self) -> list[tuple[int, int, int]]:
        """Attempt, restart and step of every line, in the order in which they were done."""
        return [(line["attempt"], line["restart"], line["step"]) for line in self.read_step_log()]

    def last_step(self) -> int:
        """The last step, 0 before the first one."""
        return max((step for _, _, step in self.steps()), default=0)

    def checkpoints(self) -> dict[int, Path]:
        """The committed ones, by their step."""
        return {step: path for step, path in self._checkpoint_folders() if (path / MARKER).exists()}

    def unfinished_checkpoints(self) -> list[Path]:
        """Checkpoints that are being written: something is there, and it is not committed."""
        return [path for _, path in self._checkpoint_folders() if not (path / MARKER).exists() and any(path.iterdir())]

    def last_evaluation(self) -> float:
        """The loss on what was held out, after the last step."""
        loss: float = self.read_step_log()[-1]["evalLoss"]
        return loss

    def exported_loss(self) -> float:
        """The same, as Transformers see it that load the export."""
        [corpus] = [report.parent for report in self.folder.glob("data/*/report.json") if _read_split(report) == "test"]
        return float(_run_command(TRAINER_PYTHON, HELD_OUT_LOSS, self.folder / "export", corpus))

    def read_step_log(self) -> list[dict[str, Any]]:
        """All whole lines of the step log."""
        log = self.folder / "steps.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _checkpoint_folders(self) -> list[tuple[int, Path]]:
        folders = (self.folder / "checkpoints").glob("step-*")
        named = ((COMMIT.fullmatch(path.name), path) for path in folders)
        return sorted((int(match[1]), path) for match, path in named if match is not None)


@dataclass(frozen=True, slots=True)
class SubmittedJob:
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
        until(lambda: self.phase in ENDS, seconds=TRAINING_SECONDS, waiting_for=self.describe)
        assert self.phase == "Succeeded", self.describe()

    def pod_nodes(self) -> dict[str, str]:
        """The trainer pods of the job, and the node of each, which is empty before it has one."""
        return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in self.list_pods()}

    def pod_uids(self) -> dict[str, str]:
        """The trainer pods of the job, and the UID of each: another pod has another."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.list_pods()}

    def list_pods(self) -> list[dict[str, Any]]:
        """The trainer pods as they are now."""
        query = f"labelSelector={Label.JOB}={self.name},{Label.ROLE}={PodRole.TRAINER}"
        pods = self.nodes.plane.api.get(f"/api/v1/namespaces/{self.namespace}/pods?{query}")["items"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def run(self) -> Run:
        """Return what it left on its volume."""
        claim = self.read()["spec"]["storage"].get("claimName", f"{self.name}-storage")
        return Run(self.nodes.storage.volume_path(self.namespace, claim) / self.name)

    def read_trainer_log(self) -> str:
        """Return the last lines of all trainers."""
        return "\n".join(self._read_log(pod) for pod in self.pod_nodes())

    def running_reason(self) -> str:
        """Return what it says of why it runs, or does not: the reason and message of condition Running."""
        conditions = {found["type"]: found for found in self.read().get("status", {}).get("conditions", ())}
        found = conditions.get("Running", {"reason": "", "message": ""})
        return f"{found['reason']}: {found['message']}"

    def set_suspended(self, *, suspended: bool = True) -> None:
        """Ask it to stop, or to go on."""
        spec = {"lifecycle": {"suspend": suspended}}
        self.nodes.plane.api.merge(f"{JOBS.format(self.namespace)}/{self.name}", {"spec": spec})

    def await_steps(self, count: int) -> None:
        """That many more are done."""
        target_step = self.run().last_step() + count
        until(lambda: self.run().last_step() >= target_step, seconds=TRAINING_SECONDS, waiting_for=self.describe)

    def has_reported_checkpoint(self) -> bool:
        """Return whether its status knows of one: the operator asks every now and then."""
        return "lastCheckpointStep" in self.read()["status"].get("progress", {})

    def describe(self) -> str:
        """Everything there is to say."""
        at = f"--namespace={self.namespace}"
        kubectl = self.nodes.plane.kubectl
        status = json.dumps(self.read().get("status"))
        return "\n".join([kubectl("get", "moetrainingjobs,pods,events", at), status, self.read_trainer_log()])

    def _read_log(self, pod: str) -> str:
        try:
            return self.nodes.plane.kubectl("logs", pod, f"--namespace={self.namespace}", "--tail=20")
        except KubectlError as nothing:
            return str(nothing)


@contextmanager
def install_release(nodes: Cluster, folder: Path) -> Iterator[Release]:
    """The chart, with the operator and the trainer of this tree on every node; CannotBuildError without them."""
    nodes.load_images({f"moejob-{name}:{VERSION}": build_image(name) for name in IMAGES})
    with release(nodes.plane, folder) as installed_release:
        installed_release.install(VALUES)
        yield installed_release


def over_two_nodes(job: Job) -> Job:
    """A job of two ranks as one of two pods that fit on no node together."""
    spec = job["spec"]
    return job | {"spec": spec | {"resources": spec["resources"] | {"gpusPerNode": 1, "cpu": 1}}}


def read_example() -> Job:
    """The one that comes with moejob."""
    job: Job = yaml.safe_load((ROOT / "examples" / "tiny-sft.yaml").read_text())
    return job


def submit_job(nodes: Cluster, namespace: str, job: Job) -> SubmittedJob:
    """A job, given to the operator."""
    nodes.plane.kubectl("apply", "-f", "-", f"--namespace={namespace}", stdin=yaml.safe_dump(job))
    return SubmittedJob(nodes, namespace, job["metadata"]["name"])


def run_here(job: Job, folder: Path) -> Run:
    """The same job without a cluster, to its end."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    _run_command(MOEJOB, "run", file, "--run-dir", folder / "run")
    return Run(folder / "run")


def _run_command(*command: str | Path) -> str:
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=TRAINING_SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, f"{command}: {result.stdout[-3000:]}{result.stderr[-3000:]}"
    return result.stdout


def _read_split(report: Path) -> str:
    split: str = json.loads(report.read_text())["split"]
    return split
