"""Says by name why no nodes can run here; decides nothing about it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

from cluster.nodes.cgroups import missing_controllers
from cluster.nodes.cluster import Settings
from cluster.nodes.linux_namespaces import MACHINE, NamespaceError, run_command

# Of iproute2, util-linux and e2fsprogs.
COMMANDS = ("ip", "losetup", "mkfs.ext4", "mount", "nsenter", "openssl", "setpriv", "unshare")
FEATURES = {
    "bridges": "ip link add tried type bridge",
    "veth links": "ip link add tried type veth peer name other",
    "mounts of its own": "mount -t tmpfs tried /run",
    "forwarding": "echo 1 >/proc/sys/net/ipv4/ip_forward && echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables",
}


def find_obstacles(settings: Settings) -> list[str]:
    """Every reason; none where nodes can run."""
    if os.geteuid() != 0:
        return ["not root"]
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        return [f"no {', '.join(missing)} in $PATH"]
    return [*_of_the_kernel(), *_of_the_network(settings)]


def _of_the_kernel() -> Iterator[str]:
    yield from (f"no cgroup controller {name}" for name in missing_controllers())
    if "\toverlay\n" not in Path("/proc/filesystems").read_text():
        yield "the kernel has no overlay file system"
    refusal = _find_refusal("true")
    if refusal is not None:
        yield f"the kernel makes no namespaces: {refusal}"
        return
    for feature, command in FEATURES.items():
        refusal = _find_refusal(command)
        if refusal is not None:
            yield f"no {feature} in a namespace: {refusal}"


def _of_the_network(settings: Settings) -> Iterator[str]:
    wanted = (settings.addresses.nodes, settings.addresses.pods)
    for route in run_command("ip", "-4", "route").splitlines():
        taken = route.split()[0]
        # Where another run has such a cluster now, this one waits for its end.
        is_elsewhere = f"dev {settings.owner}" not in route
        if is_elsewhere and taken[0].isdigit() and any(ip_network(taken).overlaps(network) for network in wanted):
            yield f"this machine has a route to {taken} already, which the nodes need for themselves"


def _find_refusal(command: str) -> str | None:
    """Return what a node's namespaces say to a command; None when it does what it should."""
    flags = [*(f"--{kind}" for kind in MACHINE), "--fork", "--kill-child", "--mount-proc"]
    try:
        run_command("unshare", *flags, "sh", "-c", command)
    except NamespaceError as refusal:
        return str(refusal)
    return None
