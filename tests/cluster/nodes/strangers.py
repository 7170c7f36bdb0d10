"""Pods that are none of a job's and try to reach it: from where, what, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.control_plane.plane import ControlPlane
from cluster.nodes.cluster import Cluster
from cluster.nodes.pods import VOLUME
from cluster.waiting import until

INTRUDER = (Path(__file__).parent / "attacks.py").read_text()
_LISTENING, _ESTABLISHED = "0A", "01"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
# A verb of the intruder, a host and a port.
Try = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class ProbePod:
    """A pod with Python in it, which does what it is given."""

    plane: ControlPlane
    namespace: str
    pod: str

    def run_tries(self, tries: Iterable[Try]) -> dict[Try, str]:
        """Return what came of each."""
        tries = list(tries)
        within = ("exec", self.pod, f"--namespace={self.namespace}", "--", "python", "-c", INTRUDER, json.dumps(tries))
        return dict(zip(tries, json.loads(self.plane.kubectl(*within)), strict=True))


@contextmanager
def make_namespace(nodes: Cluster) -> Iterator[str]:
    """A namespace that is left to itself afterwards."""
    name = nodes.plane.api.create("/api/v1/namespaces", {"metadata": {"generateName": "strangers-"}})["metadata"][
        "name"
    ]
    until(lambda: nodes.plane.has_service_account(name), waiting_for=f"a service account in {name}")
    yield name
    nodes.plane.api.delete(f"/api/v1/namespaces/{name}")


def start_stranger(
    nodes: Cluster,
    namespace: str,
    image: str,
    node: str,
    labels: Mapping[str, str] | None = None,
    claim: str | None = None,
) -> ProbePod:
    """A pod that runs in a namespace, on a node, under the restricted standard; with the labels of another, or none.

    It mounts a claim where one is named.
    """
    name = "stranger" if labels is None else "namesake"
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container: dict[str, Any] = {
        "name": "main",
        "image": image,
        "command": ["python", "-c", "import time; time.sleep(3600)"],
        "securityContext": security,
    }
    spec: dict[str, Any] = {
        "containers": [container],
        "nodeName": node,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    if claim is not None:
        container["volumeMounts"] = [{"name": "volume", "mountPath": VOLUME}]
        spec["volumes"] = [{"name": "volume", "persistentVolumeClaim": {"claimName": claim}}]
    api, path = nodes.plane.api, f"/api/v1/namespaces/{namespace}/pods"
    api.create(path, {"metadata": {"name": name, "labels": dict(labels or {})}, "spec": spec})
    until(
        lambda: api.get(f"{path}/{name}")["status"]["phase"] == "Running",
        waiting_for=lambda: nodes.plane.kubectl("describe", "pod", name, f"--namespace={namespace}"),
    )
    return ProbePod(nodes.plane, namespace, name)


def listening_ports(nodes: Cluster, namespace: str, pod: str) -> set[int]:
    """The ports of a pod on which something listens that others can reach where no policy is enforced."""
    pid = min(nodes.pids(namespace, pod))
    return {
        port for table in ("tcp", "tcp6") for port in _listening_ports(Path(f"/proc/{pid}/net/{table}").read_text())
    }


def count_connections(nodes: Cluster, namespace: str, pod: str, port: int) -> int:
    """Count the connections to a port of a pod."""
    pid = min(nodes.pids(namespace, pod))
    tables = (Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6"))
    return sum((at, state) == (port, _ESTABLISHED) for table in tables for _, at, state in _parse_sockets(table))


def _listening_ports(table: str) -> Iterator[int]:
    return (port for local, port, state in _parse_sockets(table) if state == _LISTENING and local not in _LOOPBACK)


def _parse_sockets(table: str) -> Iterator[tuple[str, int, str]]:
    """Address and port of this side, and the state."""
    for line in table.splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        address, _, port = local.partition(":")
        yield address, int(port, 16), state


def await_address(nodes: Cluster, namespace: str, pod: str) -> str:
    """Address of a pod, once it has one."""
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
    pod_address: str = until(
        lambda: nodes.plane.api.get(path)["status"].get("podIP", ""), waiting_for=f"an address of {pod}"
    )
    return pod_address
