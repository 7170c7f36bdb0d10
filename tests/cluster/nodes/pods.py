"""Pods for tests of nodes: a shell script each, with what matters to a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.control_plane.api import RefusedError
from cluster.control_plane.plane import ControlPlane
from cluster.nodes.cluster import BUSYBOX_IMAGE
from cluster.waiting import until

VOLUME = "/volume"


@dataclass(frozen=True, slots=True)
class Shell:
    """A script in a pod. One that asks for a node by name gets it from the scheduler, as all others do."""

    script: str
    node: str | None = None
    claim: str | None = None
    memory: str | None = None
    gpus: int = 0
    # Of a headless Service of that name; the pod is found as NAME.SERVICE.
    service: str | None = None
    is_ready: bool = True
    grace_seconds: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)

    def body(self, name: str) -> dict[str, Any]:
        """The pod."""
        limits = {"memory": self.memory, "nvidia.com/gpu": str(self.gpus) if self.gpus else None}
        container: dict[str, Any] = {
            "name": "main",
            "image": BUSYBOX_IMAGE,
            "command": ["sh", "-c", self.script],
            "resources": {"limits": {key: value for key, value in limits.items() if value}},
        }
        if not self.is_ready:
            container["readinessProbe"] = {"exec": {"command": ["sh", "-c", "exit 1"]}}
        spec: dict[str, Any] = {
            "containers": [container],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace_seconds,
            "hostname": name,
            "nodeSelector": {"kubernetes.io/hostname": self.node} if self.node else {},
        }
        if self.claim is not None:
            container["volumeMounts"] = [{"name": "volume", "mountPath": VOLUME}]
            spec["volumes"] = [{"name": "volume", "persistentVolumeClaim": {"claimName": self.claim}}]
        if self.service is not None:
            spec["subdomain"] = self.service
        labels = {"service": self.service or "none", **self.labels}
        return {"metadata": {"name": name, "labels": labels}, "spec": spec}


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of a test's namespace."""

    plane: ControlPlane
    namespace: str

    def create(self, name: str, shell: Shell) -> None:
        """Create one and go on."""
        self.plane.api.create(self._path("pods"), shell.body(name))

    def run(self, name: str, shell: Shell) -> None:
        """Create one and return when it runs."""
        self.create(name, shell)
        self.await_phase(name, "Running")

    def output(self, name: str, shell: Shell) -> str:
        """Return what one writes that ends well."""
        self.create(name, shell)
        self.await_phase(name, "Succeeded")
        return self.logs(name)

    def await_phase(self, name: str, phase: str) -> None:
        """Return when a pod is in a phase."""
        until(lambda: self.phase(name) == phase, waiting_for=lambda: f"{phase}: {self.describe(name)}")

    def get(self, name: str) -> Any:
        """One pod."""
        return self.plane.api.get(self._path(f"pods/{name}"))

    def phase(self, name: str) -> str:
        """Of one pod."""
        phase: str = self.get(name)["status"]["phase"]
        return phase

    def ending(self, name: str) -> Any:
        """Return how the container of a pod has ended."""
        [container] = self.get(name)["status"]["containerStatuses"]
        return container["state"]["terminated"]

    def is_gone(self, name: str) -> bool:
        """Return whether there is no such pod."""
        try:
            self.get(name)
        except RefusedError as refusal:
            return refusal.reason == "NotFound"
        return False

    def delete(self, name: str) -> None:
        """Ask one to end."""
        self.plane.api.delete(self._path(f"pods/{name}"))

    def logs(self, name: str) -> str:
        """Return what one has written."""
        return self.plane.kubectl("logs", name, f"--namespace={self.namespace}")

    def exec(self, name: str, script: str) -> str:
        """Return what a script writes in a pod that runs."""
        return self.plane.kubectl("exec", name, f"--namespace={self.namespace}", "--", "sh", "-c", script)

    def describe(self, name: str) -> str:
        """Return what Kubernetes has to say of one."""
        return self.plane.kubectl("describe", "pod", name, f"--namespace={self.namespace}")

    def create_service(self, name: str, *, headless: bool = True) -> None:
        """A name for pods, ready or not; or an address for those that are ready."""
        spec: dict[str, Any] = {"selector": {"service": name}, "ports": [{"port": 8080}]}
        if headless:
            spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        self.plane.api.create(self._path("services"), {"metadata": {"name": name}, "spec": spec})

    def create_claim(self, name: str, size: str = "1Gi", storage_class: str | None = None) -> None:
        """A claim that many pods may use at once; of the default class unless another is given."""
        self.plane.api.create(self._path("persistentvolumeclaims"), build_claim(name, size, storage_class))

    def _path(self, rest: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/{rest}"


def build_claim(name: str, size: str, storage_class: str | None) -> dict[str, Any]:
    """A claim that many pods may use at once."""
    spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {"metadata": {"name": name}, "spec": spec}
