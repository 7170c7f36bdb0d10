"""A whole control plane on loopback: etcd, API server, controller manager, scheduler, and fake nodes if asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from charts import Helm
from cluster.control_plane.api import Api, RefusedError
from cluster.control_plane.components import LOOPBACK, Component, Site, flags, health_url, new_site
from cluster.control_plane.kubeconfigs import write_for_certificate, write_for_token
from cluster.processes import Process
from cluster.waiting import until

GPUS_PER_NODE = 8
# In the order in which they start.
ALWAYS = (Component.ETCD, Component.API_SERVER, Component.CONTROLLER_MANAGER, Component.SCHEDULER)
Flags = Mapping[Component, Mapping[str, object]]
PROGRAMS = (*Component, "kubectl", "helm")


class KubectlError(Exception):
    """kubectl failed; its words are the message."""


class ControlPlane:
    """A running control plane. Everything is in its folder, logs too; nothing outlives `control_plane`."""

    def __init__(
        self, site: Site, programs: Mapping[str, Path], components: tuple[Component, ...], changed: Flags
    ) -> None:
        self.folder = site.folder
        self.url = site.server.url
        self.ca = site.server.ca
        self.audit_log = site.audit_log
        self.kubeconfig = write_for_certificate(site.folder / "admin.kubeconfig", site.server, site.admin)
        self.api = Api(site.server, site.admin)
        self.processes = {
            component: Process(
                component, [programs[component], *flags(component, site, changed.get(component, {}))], site.folder
            )
            for component in components
        }
        self.nodes: list[str] = []
        self.site = site
        self._kubectl = programs["kubectl"]
        self.helm = Helm(programs["helm"], site.folder / "helm")

    def audited(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the entries of the audit log that began after it had a length, and are whole.

        A client that is gone before it is known who asks leaves an entry without a user, which is left out.
        """
        with self.audit_log.open("rb") as log:
            log.seek(max(0, since - 1))
            content = log.read()
        # A line may have been on its way then, and another may be now.
        begun = content.partition(b"\n")[2] if since else content
        found = (json.loads(line) for line in begun.rpartition(b"\n")[0].splitlines())
        return [entry for entry in found if "username" in entry["user"]]

    def start(self, *components: Component) -> None:
        """Run components side by side and return when all are ready."""
        for component in components:
            self.processes[component].start()
        for component in components:
            self.processes[component].wait_until(partial(self._is_ready, component))

    def expect_running(self) -> None:
        """Say which component has ended by itself, for want of room on the disk say: all who ask would wait in vain."""
        for process in self.processes.values():
            process.expect_running()

    def stop(self, *components: Component) -> None:
        """End components as a crash would."""
        for component in components:
            self.processes[component].stop()

    def restart(self, *components: Component) -> None:
        """Crash components and return when all are ready again. Kwok begins again: it may not retry what failed."""
        kubelets = tuple({Component.KWOK} & self.processes.keys())
        self.stop(*components, *kubelets)
        self.start(*components, *kubelets)

    def kubectl_command(self, *arguments: str | Path) -> list[str | Path]:
        """Return what runs kubectl as an administrator."""
        return [self._kubectl, f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.folder}/kubectl", *arguments]

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Return what kubectl prints, as an administrator."""
        command = self.kubectl_command(*arguments)
        # The settings of the user who runs the tests are not for kubectl.
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, env=os.environ | {"KUBERC": "off"}
        )
        if done.returncode:
            raise KubectlError(done.stderr)
        return done.stdout

    def service_account_kubeconfig(self, namespace: str, name: str, by_way_of: str | None = None) -> Path:
        """With what a pod of the service account would speak to the API server, for an hour; or to another address."""
        token = self.token(namespace, name)
        server = self.site.server if by_way_of is None else replace(self.site.server, url=by_way_of)
        path = self.folder / f"{namespace}-{name}{'' if by_way_of is None else '-proxied'}.kubeconfig"
        return write_for_token(path, server, token, namespace)

    def token(self, namespace: str, name: str) -> str:
        """Return what a service account shows to be believed, for an hour."""
        return self.kubectl("create", "token", name, f"--namespace={namespace}").strip()

    def add_nodes(self, count: int) -> None:
        """Fake nodes, each with GPUs of its own, and return when pods can go there."""
        self.nodes = [f"node-{index}" for index in range(count)]
        for name in self.nodes:
            self.api.create("/api/v1/nodes", _node(name))
        for name in self.nodes:
            until(partial(self.takes_pods, name), waiting_for=f"{name} to take pods")

    def has_service_account(self, namespace: str) -> bool:
        """Return whether pods can be created in a namespace."""
        try:
            self.api.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")
        except RefusedError:
            return False
        return True

    def takes_pods(self, node: str) -> bool:
        """Return whether a node is known, ready and not tainted."""
        try:
            seen = self.api.get(f"/api/v1/nodes/{node}")
        except RefusedError:
            return False
        conditions = {condition["type"]: condition["status"] for condition in seen["status"].get("conditions", ())}
        return conditions.get("Ready") == "True" and not seen["spec"].get("taints")

    def _is_ready(self, component: Component) -> bool:
        if not self.api.is_healthy(health_url(component, self.site)):
            return False
        return component is not Component.CONTROLLER_MANAGER or self.has_service_account("default")


@contextmanager
def control_plane(
    folder: Path,
    programs: Mapping[str, Path],
    nodes: int = 0,
    changed: Flags = MappingProxyType({}),
    address: str = LOOPBACK,
) -> Iterator[ControlPlane]:
    """A control plane whose files are in an empty folder; `programs` says where etcd, kubectl and the others are.

    `changed` are flags that take the place of ours, or are added to them; `address` is where the API server is reached.
    """
    components = (*ALWAYS, Component.KWOK) if nodes else ALWAYS
    plane = ControlPlane(new_site(folder, address), programs, components, changed)
    try:
        plane.start(Component.ETCD, Component.API_SERVER)
        plane.start(*components[2:])
        plane.add_nodes(nodes)
        yield plane
    finally:
        plane.stop(*reversed(components))
        # The logs stay, the data would only fill the disk.
        shutil.rmtree(folder / "etcd", ignore_errors=True)


def _node(name: str) -> dict[str, object]:
    resources = {"cpu": "96", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": str(GPUS_PER_NODE)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kwok.x-k8s.io/node": "fake", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
        },
        "status": {"capacity": resources, "allocatable": resources},
    }
