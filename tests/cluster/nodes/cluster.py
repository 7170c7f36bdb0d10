"""A cluster of real nodes on this machine, without Docker: brings its parts up in order, and leaves nothing behind.

Nodes, their network and all that runs on them end with us, whatever ends us: see linux_namespaces. Cgroups alone
outlive a kill, and the next start removes them.
"""

from __future__ import annotations

import fcntl
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import IO, Any

from cluster.binaries import Report, cache, find_or_build
from cluster.control_plane.components import Component
from cluster.control_plane.kubeconfigs import write_for_certificate
from cluster.control_plane.plane import PROGRAMS as PLANE_PROGRAMS
from cluster.control_plane.plane import ControlPlane, control_plane
from cluster.nodes.cgroups import Cgroup
from cluster.nodes.dns import Dns
from cluster.nodes.images import write_small_image
from cluster.nodes.kubelet import Membership
from cluster.nodes.network import Addresses, Switch, remove_link
from cluster.nodes.node import CNI_PROGRAMS, Node, Programs
from cluster.nodes.packages import find_or_unpack
from cluster.nodes.registry import Registry
from cluster.nodes.runtime import PAUSE_IMAGE
from cluster.nodes.storage import Storage
from cluster.waiting import until

PROGRAMS = (
    *(*PLANE_PROGRAMS, "kubelet", "kube-proxy", "coredns"),
    *("containerd", "containerd-shim-runc-v2", "ctr", "pause", *CNI_PROGRAMS),
)
# A shell and the common commands.
BUSYBOX_IMAGE = "moejob.test/busybox:1"
SHELL_COMMANDS = (
    "sh",
    "cat",
    "echo",
    "sleep",
    "head",
    "tail",
    "nc",
    "nslookup",
    "wget",
    "httpd",
    "dd",
    "hostname",
    "id",
)
# After so long a silence a node is lost; Kubernetes' own default is 50.
LOST_SECONDS = 20
ADDRESSES = Addresses(IPv4Network("10.89.0.0/24"), IPv4Network("10.244.0.0/16"))
LOCKS = Path("/run/lock")


@dataclass(frozen=True, slots=True)
class Settings:
    """Two clusters run side by side when they differ in owner and addresses."""

    # Names all that the machine can see of a cluster: the link to it, its cgroups, its lock; and what it keeps.
    owner: str = "moejob-nodes"
    nodes: tuple[str, ...] = ("node-1", "node-2")
    gpus_per_node: int = 8
    addresses: Addresses = ADDRESSES


# Beside the first, for tests of what becomes of a cluster.
SPARE = Settings("moejob-spare", addresses=Addresses(IPv4Network("10.88.0.0/24"), IPv4Network("10.243.0.0/16")))


class Cluster:
    """A control plane and its nodes, with what they need: a registry, DNS, storage, a network that can be cut."""

    def __init__(self, settings: Settings, plane: ControlPlane, nodes: Mapping[str, Node], parts: ClusterParts) -> None:
        self.plane = plane
        self.nodes = nodes
        self.registry = parts.registry
        self.storage = parts.storage
        self._switch = parts.switch
        self._settings = settings

    def load_images(self, archives: Mapping[str, Path]) -> None:
        """Have the images of OCI archives or folders on every node, each under a name with a tag.

        Nodes keep images for the next cluster. What is not served any more goes now: a trainer is 5 GB on each.
        """
        names = [self.registry.add_image(name, archive) for name, archive in archives.items()]
        for node in self.nodes.values():
            for name in names:
                node.runtime.pull_image(name)
            node.runtime.remove_images(node.runtime.list_images() - self.registry.references())

    def cut_off(self, node: str) -> None:
        """Unplug a node from the others and from the control plane."""
        self._switch.cut_node(node)

    def reconnect(self, node: str) -> None:
        """Plug it in again."""
        self._switch.reconnect_node(node)

    def start_kubelet(self, node: str) -> None:
        """Start the kubelet of a node that was stopped, and return when it knows its pods and pods can go there."""
        before = self._heartbeat_at(node)
        self.nodes[node].start_kubelet()
        # What the API server says of a node outlives the kubelet for a while.
        until(lambda: self._heartbeat_at(node) != before, waiting_for=f"word from {node}")
        self.await_ready(node)

    def await_ready(self, node: str) -> None:
        """Return when a node takes pods and has its GPUs, which a kubelet that starts takes for a mistake."""
        until(partial(self.plane.takes_pods, node), waiting_for=f"{node} to be ready")
        gpus = {"nvidia.com/gpu": str(self._settings.gpus_per_node)}
        self.plane.api.merge(f"/api/v1/nodes/{node}/status", {"status": {"capacity": gpus, "allocatable": gpus}})

    def is_ready(self, node: str) -> bool:
        """Return whether the control plane hears of a node."""
        return bool(self._ready_condition(node)["status"] == "True")

    def pids(self, namespace: str, pod: str) -> set[int]:
        """The processes of a pod, as the machine numbers them."""
        body = self.plane.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        return self.nodes[body["spec"]["nodeName"]].pids(body["metadata"]["uid"])

    def _heartbeat_at(self, node: str) -> str:
        heartbeat_at: str = self._ready_condition(node)["lastHeartbeatTime"]
        return heartbeat_at

    def _ready_condition(self, node: str) -> Any:
        conditions = self.plane.api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
        return next(condition for condition in conditions if condition["type"] == "Ready")


@dataclass(frozen=True, slots=True)
class ClusterParts:
    """The parts that a cluster has one of."""

    switch: Switch
    registry: Registry
    storage: Storage


def find_programs(report: Report) -> Programs:
    """All programs of a cluster, built or unpacked where they are missing."""
    unpacked = find_or_unpack(report)
    return Programs({**find_or_build(PROGRAMS, report), **unpacked.programs}, unpacked.libraries)


@contextmanager
def run_cluster(folder: Path, programs: Programs, settings: Settings = Settings()) -> Iterator[Cluster]:
    """A cluster whose files are in an empty folder. One of an owner at a time: a second waits for the first to end."""
    with ExitStack() as ending:
        ending.enter_context(_hold_lock(settings.owner))
        remove_leftovers(settings)
        ending.callback(remove_leftovers, settings)
        yield _start_parts(folder, programs, settings, ending)


def remove_leftovers(settings: Settings) -> None:
    """Remove what outlives a kill: cgroups for good, the link for a moment."""
    remove_link(settings.owner)
    Cgroup(settings.owner).remove()


def _start_parts(folder: Path, programs: Programs, settings: Settings, ending: ExitStack) -> Cluster:
    """Each part ends before those that were there when it came."""
    address = settings.addresses.machine_address
    switch = Switch(settings.owner, settings.addresses, programs.paths["pause"], folder)
    ending.callback(switch.stop)
    switch.start(len(settings.nodes))
    registry = Registry(str(address))
    ending.callback(registry.stop)
    registry.start()
    _add_images(registry, programs, folder)
    plane = ending.enter_context(_start_plane(folder / "plane", programs, str(address)))
    dns = Dns(programs.paths["coredns"], address, write_kubeconfig(plane, "coredns", "system:masters"), folder)
    ending.callback(dns.stop)
    dns.start()
    proxy = write_kubeconfig(plane, "system:kube-proxy")
    nodes = {
        name: Node(
            _build_membership(index, plane, settings, proxy),
            programs,
            folder / name,
            cache() / "nodes" / settings.owner / name,
            registry.url,
        )
        for index, name in enumerate(settings.nodes)
    }
    _start_nodes(nodes.values(), switch, ending)
    storage = Storage(plane.api, list(nodes.values()), folder / "volumes")
    ending.callback(storage.stop)
    storage.start()
    running = Cluster(settings, plane, nodes, ClusterParts(switch, registry, storage))
    for name in nodes:
        running.await_ready(name)
    return running


@contextmanager
def _start_plane(folder: Path, programs: Programs, address: str) -> Iterator[ControlPlane]:
    folder.mkdir()
    changed = {Component.CONTROLLER_MANAGER: {"node-monitor-grace-period": f"{LOST_SECONDS}s"}}
    with control_plane(folder, programs.paths, changed=changed, address=address) as plane:
        yield plane


def _start_nodes(nodes: Collection[Node], switch: Switch, ending: ExitStack) -> None:
    for index, node in enumerate(nodes):
        ending.callback(node.stop)
        node.start_machine()
        switch.connect(node.name, index, node.namespaces, len(nodes))
    for node in nodes:
        node.start()


def _build_membership(index: int, plane: ControlPlane, settings: Settings, proxy_kubeconfig: Path) -> Membership:
    name, addresses = settings.nodes[index], settings.addresses
    return Membership(
        name=name,
        address=addresses.node_address(index),
        pods=addresses.pod_network(index),
        all_pods=addresses.pods,
        dns=addresses.machine_address,
        cgroup=f"{settings.owner}/{name}",
        ca=plane.ca,
        kubeconfig=write_kubeconfig(plane, f"system:node:{name}", "system:nodes"),
        proxy_kubeconfig=proxy_kubeconfig,
    )


def write_kubeconfig(plane: ControlPlane, name: str, group: str | None = None) -> Path:
    """Return how one talks to the API server who has a certificate of this name and group."""
    path = plane.folder / f"{name.replace(':', '-')}.kubeconfig"
    return write_for_certificate(path, plane.site.server, plane.site.authority.client(name, group))


def _add_images(registry: Registry, programs: Programs, folder: Path) -> None:
    """The two that no cluster of tests is without; pods bring them to the nodes when they need them."""
    pause = write_small_image(folder / "pause.tar", {"pause": programs.paths["pause"]}, {}, ["/pause"])
    registry.add_image(PAUSE_IMAGE, pause)
    registry.add_image(BUSYBOX_IMAGE, shell_image(folder / "busybox.tar", programs))


def shell_image(path: Path, programs: Programs, *script: str, user: str = "") -> Path:
    """An image of a shell and the common commands; with a script that runs, or one that a pod brings along."""
    files, links = {"bin/busybox": programs.paths["busybox"]}, {f"bin/{name}": "busybox" for name in SHELL_COMMANDS}
    return write_small_image(path, files, links, ["/bin/sh", *(("-c", *script) if script else ())], user)


@contextmanager
def _hold_lock(owner: str) -> Iterator[IO[str]]:
    with (LOCKS / f"{owner}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
