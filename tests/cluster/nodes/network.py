"""Addresses, and the switch that nodes and machine are plugged into; knows nothing of Kubernetes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from cluster.nodes.linux_namespaces import NETWORK, Enclosure, EnclosureError, printed

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
    def machine(self) -> IPv4Address:
        """Return where nodes and pods find what runs beside them: the API server, DNS, the registry."""
        return self.nodes[1]

    def node(self, index: int) -> IPv4Address:
        """Of a node."""
        return self.nodes[11 + index]

    def pods_of(self, index: int) -> IPv4Network:
        """Return where the pods of a node are."""
        return list(self.pods.subnets(new_prefix=24))[index]

    def routes(self, count: int) -> dict[IPv4Network, IPv4Address]:
        """By way of whom the pods of each node are reached."""
        return {self.pods_of(index): self.node(index) for index in range(count)}


class Switch:
    """A bridge in a network namespace of its own, where no packet filter of the machine sees what crosses it."""

    def __init__(self, link: str, addresses: Addresses, first: Path, folder: Path) -> None:
        self._link = link
        self._addresses = addresses
        self._enclosure = Enclosure("switch", NETWORK, first, folder)

    def start(self, nodes: int) -> None:
        """Plug the machine in, and show it the way to the pods of that many nodes."""
        self._enclosure.start()
        self._enclosure.run("ip", "link", "add", BRIDGE, "type", "bridge")
        self._enclosure.run("ip", "link", "set", BRIDGE, "up")
        peer = ("peer", "name", UPLINK, "netns", str(self._enclosure.pid))
        printed("ip", "link", "add", self._link, "type", "veth", *peer)
        self._plug(UPLINK)
        printed(
            "ip", "address", "add", f"{self._addresses.machine}/{self._addresses.nodes.prefixlen}", "dev", self._link
        )
        printed("ip", "link", "set", self._link, "up")
        for pods, node in self._addresses.routes(nodes).items():
            printed("ip", "route", "add", str(pods), "via", str(node))

    def stop(self) -> None:
        """End it. What was plugged in is gone, and so are all routes through it."""
        self._enclosure.stop()
        unplug(self._link)

    def connect(self, name: str, index: int, node: Enclosure, nodes: int) -> None:
        """Plug a node in: its address, and the way to the pods of the others."""
        self._enclosure.run("ip", "link", "add", name, "type", "veth", "peer", "name", CABLE, "netns", str(node.pid))
        self._plug(name)
        address = f"{self._addresses.node(index)}/{self._addresses.nodes.prefixlen}"
        node.run("ip", "address", "add", address, "dev", CABLE)
        for link in ("lo", CABLE):
            node.run("ip", "link", "set", link, "up")
        node.run("ip", "route", "add", "default", "via", str(self._addresses.machine))
        for pods, other in self._addresses.routes(nodes).items():
            if other != self._addresses.node(index):
                node.run("ip", "route", "add", str(pods), "via", str(other))

    def cut(self, name: str) -> None:
        """Unplug a node: what it sends is lost, without an error."""
        self._enclosure.run("ip", "link", "set", name, "down")

    def mend(self, name: str) -> None:
        """Plug a node in again."""
        self._enclosure.run("ip", "link", "set", name, "up")

    def _plug(self, port: str) -> None:
        self._enclosure.run("ip", "link", "set", port, "master", BRIDGE, "up")


def unplug(link: str) -> None:
    """Take the machine's link away at once: the kernel takes it a little after the last process of the switch."""
    with suppress(EnclosureError):
        printed("ip", "link", "delete", link)
