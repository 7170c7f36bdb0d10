"""Rollout engines of a job on the nodes: its pods of that role, what they do at the moment, and faults of theirs.

vLLM comes to the pods on a volume: as an image it would take 25 GB of this machine, in a store, a registry and on each
node. All else of those pods is as the operator makes it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.nodes.cluster import Cluster
from cluster.nodes.images import write_variant
from cluster.nodes.training import ROOT, TRAINING_SECONDS, VERSION, Job, Run, SubmittedJob
from cluster.waiting import until
from images import build_image
from moejob_api.contract.pods import Environment, Label, PodPort, PodRole

IMAGE = f"moejob.test/engine:{VERSION}"
STEPS = 3
# The folder of the environment on any volume that a job's sources name.
ENVIRONMENT = "rollout-environment"
# Of the images. Compiled modules load in no other version.
_PYTHON = "python3.13"
# In the pod. vLLM's kernels for the CPU need libnuma, which the trainer's image lacks.
_START = (
    f"cd /claims/*/{ENVIRONMENT} && PYTHONPATH=$PWD LD_LIBRARY_PATH=$PWD/lib HOME=/tmp "
    f"exec /usr/bin/{_PYTHON} -P -m moejob_rollout"
)
_NUMA = Path("/lib/x86_64-linux-gnu/libnuma.so.1")
# Ends when vLLM computes answers, and says how many. In the pod: nothing else may speak to an engine.
_AWAIT_WORK = f"""
import os, re, time, urllib.request
from moejob_api.contract.pods import engine_key
asked = urllib.request.Request(
    "http://127.0.0.1:{PodPort.ROLLOUT.value}/metrics",
    headers={{"Authorization": "Bearer " + engine_key(os.environ["{Environment.SECRET.value}"])}},
)
until = time.monotonic() + {TRAINING_SECONDS}
while time.monotonic() < until:
    said = urllib.request.urlopen(asked, timeout=60).read().decode()
    found = re.search(r"^vllm:num_requests_running\\S* ([0-9.]+)", said, re.MULTILINE)
    if found and float(found[1]) >= 8:
        print(found[1])
        break
"""


def load_image(nodes: Cluster, folder: Path) -> None:
    """Have an image of engines on every node: the trainer's, which starts what a volume has."""
    variant = write_variant(folder / "engine", build_image("trainer-cpu"), {"Entrypoint": ["sh", "-c", _START]})
    nodes.load_images({IMAGE: variant})


def provide_environment(volume: Path) -> None:
    """Put vLLM and our package on a volume, as links to the files of the environment of this checkout."""
    place, site = volume / ENVIRONMENT, ROOT / f".venv/rollout/lib/{_PYTHON}/site-packages"
    if not site.exists():
        pytest.skip(
            f"engines in pods need .venv/rollout of {_PYTHON}, as images have it: make PYTHON=/path/to/{_PYTHON}"
        )
    shutil.copytree(site, place, copy_function=os.link, ignore=shutil.ignore_patterns("*.pth"))
    for package in (ROOT / "rollout/src/moejob_rollout", ROOT / "crds/src/moejob_api"):
        shutil.copytree(package, place / package.name)
    (place / "lib").mkdir(exist_ok=True)
    shutil.copy(_NUMA, place / "lib")


@dataclass(frozen=True, slots=True)
class EnginePod:
    """One engine's pod."""

    name: str
    uid: str
    node: str
    restarts: int
    is_ready: bool


def engine_pods(job: SubmittedJob) -> list[EnginePod]:
    """The pods of a job's engines as they are now, those that end left out."""
    query = f"labelSelector={Label.JOB}={job.name},{Label.ROLE}={PodRole.ROLLOUT}"
    listed = job.nodes.plane.api.get(f"/api/v1/namespaces/{job.namespace}/pods?{query}")["items"]
    return [_engine_pod(pod) for pod in listed if "deletionTimestamp" not in pod["metadata"]]


def ready_engine(job: SubmittedJob) -> EnginePod:
    """Return the job's only engine once it serves."""
    return _await_ready_pod(job, lambda _: True)


def next_engine(job: SubmittedJob, before: EnginePod) -> EnginePod:
    """Return what took the place of an engine, in its pod or in another, once it serves."""
    return _await_ready_pod(job, lambda pod: (pod.uid, pod.restarts) != (before.uid, before.restarts))


def _await_ready_pod(job: SubmittedJob, is_meant: Callable[[EnginePod], bool]) -> EnginePod:
    def found() -> EnginePod | None:
        return next((pod for pod in engine_pods(job) if pod.is_ready and is_meant(pod)), None)

    engine = until(found, seconds=TRAINING_SECONDS, waiting_for=job.describe)
    assert engine is not None
    return engine


def await_answers(job: SubmittedJob, engine: EnginePod) -> None:
    """Return while an engine computes answers."""
    at = f"--namespace={job.namespace}"
    job.nodes.plane.kubectl("exec", engine.name, at, "--", "python", "-c", _AWAIT_WORK)


def kill_engine(job: SubmittedJob, engine: EnginePod) -> None:
    """All of its processes end without a word."""
    _signal_engine(job, engine, signal.SIGKILL)


def pause_engine(job: SubmittedJob, engine: EnginePod) -> None:
    """All of its processes stand still, with their connections open."""
    _signal_engine(job, engine, signal.SIGSTOP)


def _signal_engine(job: SubmittedJob, engine: EnginePod, number: signal.Signals) -> None:
    for pid in job.nodes.pids(job.namespace, engine.name):
        with suppress(ProcessLookupError, FileNotFoundError):
            if Path(f"/proc/{pid}/comm").read_text().strip() != "pause":
                os.kill(pid, number)


def away_from_trainer(job: SubmittedJob) -> EnginePod:
    """Return the engine once it is on another node than the only trainer."""
    engine, (trainer,) = ready_engine(job), job.pod_nodes().values()
    if engine.node != trainer:
        return engine
    kubectl = job.nodes.plane.kubectl
    kubectl("cordon", trainer)
    try:
        kubectl("delete", "pod", engine.name, f"--namespace={job.namespace}")
        return ready_engine(job)
    finally:
        kubectl("uncordon", trainer)


# Scores answers whose first letter is small. Of any model, some are.
_REWARD_SERVER = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        batch = json.loads(self.rfile.read(int(self.headers["content-length"])))
        scores = [float(text.lstrip()[:1].islower()) for text in batch["completions"]]
        body = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingHTTPServer(("", 8080), Judge).serve_forever()
"""


@dataclass(frozen=True, slots=True)
class RewardServer:
    """A reward behind a Service; its pod comes and goes."""

    nodes: Cluster
    namespace: str
    name: str = "judge"

    @property
    def url(self) -> str:
        return f"http://{self.name}.{self.namespace}.svc:8080/"

    def start(self) -> None:
        """Return once it serves."""
        container = {
            "name": "main",
            "image": f"moejob-trainer-cpu:{VERSION}",
            "command": ["python", "-c", _REWARD_SERVER],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        }
        spec = {
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        }
        metadata = {"name": self.name, "labels": {"service": self.name}}
        self.nodes.plane.api.create(f"{self._folder}/pods", {"metadata": metadata, "spec": spec})
        self.nodes.plane.kubectl(
            "wait", "--for=condition=Ready", f"pod/{self.name}", f"--namespace={self.namespace}", "--timeout=300s"
        )

    def stop(self) -> None:
        """Nothing answers at its address any more."""
        kill = ("delete", "pod", self.name, f"--namespace={self.namespace}", "--grace-period=0", "--force")
        self.nodes.plane.kubectl(*kill)

    @property
    def _folder(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}"


def start_reward_server(nodes: Cluster, namespace: str) -> RewardServer:
    """Start a reward, with the Service that a job names if there is none yet."""
    server = RewardServer(nodes, namespace)
    path = f"/api/v1/namespaces/{namespace}/services"
    if not any(item["metadata"]["name"] == server.name for item in nodes.plane.api.get(path)["items"]):
        spec = {"selector": {"service": server.name}, "ports": [{"port": 8080}]}
        nodes.plane.api.create(path, {"metadata": {"name": server.name}, "spec": spec})
    server.start()
    return server


def job_with_engine(model: str) -> Job:
    """One trainer and one engine. Answers are long enough for something to happen to those that give them."""
    return {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "with-engine"},
        "spec": {
            "method": "GRPO",
            "model": {"source": model, "dtype": "float32"},
            "data": {"train": [{"source": "moejob/tiny-sums", "format": "Prompts"}], "maxLength": 512},
            # A large epsilon: Adam divides gradients near zero by their own size, and would show rounding.
            "training": {"maxSteps": STEPS, "optimizer": {"learningRate": 1e-3, "epsilon": 1e-3}},
            "grpo": {
                "groupSize": 8,
                "promptsPerStep": 8,
                "maxNewTokens": 160,
                "loggedAnswers": 64,
                # Of any model, some answers begin with a letter.
                "rewards": [{"name": "format", "pattern": r" ?[a-z].*"}],
                "rollout": {"placement": "Separate", "sync": "Disk"},
            },
            "checkpoint": {"everySteps": 100, "exportHuggingFace": False},
            "storage": {"size": "1Gi", "accessModes": ["ReadWriteMany"]},
            "resources": {
                "accelerator": "CPU",
                "cpu": "200m",
                "memory": "6Gi",
                "sharedMemory": "1Gi",
                "gpusPerNode": 1,
                "rolloutImage": IMAGE,
                "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            },
        },
    }


def read_answers(run: Run) -> dict[int, list[dict[str, Any]]]:
    """The answers of each step with what they were paid, by group and member."""
    files = {int(path.stem.removeprefix("step-")): path for path in run.folder.glob("samples/step-*.jsonl")}
    return {step: [json.loads(line) for line in files[step].read_text().splitlines()] for step in sorted(files)}


def shown_score(nodes: Cluster, job: SubmittedJob) -> str:
    """Return what `kubectl get` shows under SCORE."""
    head, row = nodes.plane.kubectl("get", "mtj", job.name, f"--namespace={job.namespace}").splitlines()
    begin = head.index("SCORE")
    return row[begin:].split()[0]


def _engine_pod(pod: Any) -> EnginePod:
    metadata, [container] = pod["metadata"], pod["status"].get("containerStatuses", [{}])
    return EnginePod(
        metadata["name"],
        metadata["uid"],
        pod["spec"].get("nodeName", ""),
        container.get("restartCount", 0),
        container.get("ready", False),
    )
