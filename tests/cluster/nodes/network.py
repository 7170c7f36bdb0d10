"""Addresses, and the switch that nodes and machine are plugged into; knows nothing of Kubernetes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from cluster.nodes.linux_namespaces import NETWORK, LinuxNamespaces, NamespaceError, run_command

BRIDGE = "bridge"
# The end of the machine's cable that is in the switch.
UPLINK = "machine"
CABLE = "eth0"


@dataclass(frozen=True, slots=True)
class Addresses:
    """The networks of a cluster. They exist on this machine only, and must not be anywhere else for it."""

    nodes: IPv4Network
    pods: IPv4Network

    @property
    def machine_address(self) -> IPv4Address:
        """Return where nodes and pods find what runs beside them: the API server, DNS, the registry."""
        return self.nodes[1]

    def node_address(self, index: int) -> IPv4Address:
        """Of a node."""
        return self.nodes[11 + index]

    def pod_network(self, index: int) -> IPv4Network:
        """Return where the pods of a node are."""
        return list(self.pods.subnets(new_prefix=24))[index]

    def pod_routes(self, count: int) -> dict[IPv4Network, IPv4Address]:
        """By way of whom the pods of each node are reached."""
        return {self.pod_network(index): self.node_address(index) for index in range(count)}


class Switch:
    """A bridge in a network namespace of its own, where no packet filter of the machine sees what crosses it."""

    def __init__(self, link: str, addresses: Addresses, first: Path, folder: Path) -> None:
        self._link = link
        self._addresses = addresses
        self._namespaces = LinuxNamespaces("switch", NETWORK, first, folder)

    def start(self, nodes: int) -> None:
        """Plug the machine in, and show it the way to the pods of that many nodes."""
        self._namespaces.start()
        self._namespaces.run("ip", "link", "add", BRIDGE, "type", "bridge")
        self._namespaces.run("ip", "link", "set", BRIDGE, "up")
        peer = ("peer", "name", UPLINK, "netns", str(self._namespaces.pid))
        run_command("ip", "link", "add", self._link, "type", "veth", *peer)
        self._plug(UPLINK)
        run_command(
            "ip",
            "address",
            "add",
            f"{self._addresses.machine_address}/{self._addresses.nodes.prefixlen}",
            "dev",
            self._link,
        )
        run_command("ip", "link", "set", self._link, "up")
        for pods, node in self._addresses.pod_routes(nodes).items():
            run_command("ip", "route", "add", str(pods), "via", str(node))

    def stop(self) -> None:
        """End it. What was plugged in is gone, and so are all routes through it."""
        self._namespaces.stop()
        remove_link(self._link)

    def connect(self, name: str, index: int, node: LinuxNamespaces, nodes: int) -> None:
        """Plug a node in: its address, and the way to the pods of the others."""
        self._namespaces.run("ip", "link", "add", name, "type", "veth", "peer", "name", CABLE, "netns", str(node.pid))
        self._plug(name)
        address = f"{self._addresses.node_address(index)}/{self._addresses.nodes.prefixlen}"
        node.run("ip", "address", "add", address, "dev", CABLE)
        for link in ("lo", CABLE):
            node.run("ip", "link", "set", link, "up")
        node.run("ip", "route", "add", "default", "via", str(self._addresses.machine_address))
        for pods, other in self._addresses.pod_routes(nodes).items():
            if other != self._addresses.node_address(index):
                node.run("ip", "route", "add", str(pods), "via", str(other))

    def cut_node(self, name: str) -> None:
        """Unplug a node: what it sends is lost, without an error."""
        self._namespaces.run("ip", "link", "set", name, "down")

    def reconnect_node(self, name: str) -> None:
        """Plug a node in again."""
        self._namespaces.run("ip", "link", "set", name, "up")

    def _plug(self, port: str) -> None:
        self._namespaces.run("ip", "link", "set", port, "master", BRIDGE, "up")


def remove_link(link: str) -> None:
    """Take the machine's link away at once: the kernel takes it a little after the last process of the switch."""
    with suppress(NamespaceError):
        run_command("ip", "link", "delete", link)
