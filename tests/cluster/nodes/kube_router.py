"""NetworkPolicies, enforced on the nodes by kube-router, as people run it beside another pod network.

It has no other part in the cluster: no routes, no Services. A packet that no policy allows is refused as if nothing
listened there. Knows nothing of jobs.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address
from pathlib import Path

from cluster.binaries import Report, find_or_build
from cluster.nodes.cluster import Cluster, write_kubeconfig
from cluster.nodes.node import Node
from cluster.nodes.packages import find_firewall

NAME = "kube-router"
HEALTH_PORT = 20244
# Whatever it misses, it makes good in this time.
SYNC = "2s"
FLAGS = (
    *("--run-firewall=true", "--run-router=false", "--run-service-proxy=false", "--enable-cni=false"),
    *(f"--iptables-sync-period={SYNC}", f"--health-port={HEALTH_PORT}"),
)
# In each line of its own.
CHAINS = r"KUBE-ROUTER-\|KUBE-POD-FW-\|KUBE-NWPLCY-"


@contextmanager
def enforce_with_kube_router(nodes: Cluster, folder: Path, report: Report) -> Iterator[None]:
    """Policies hold on the nodes of a cluster; afterwards none does."""
    program = find_or_build([NAME], report)[NAME]
    words = find_firewall(folder / "firewall", report)
    kubeconfig = write_kubeconfig(nodes.plane, NAME, "system:masters")
    with ExitStack() as ending:
        for node in nodes.nodes.values():
            ending.callback(_remove_filters, node, words)
            _start_router(node, [*words, program, *FLAGS, f"--kubeconfig={kubeconfig}"], ending)
        yield


def _start_router(node: Node, command: Sequence[str | Path], ending: ExitStack) -> None:
    running = node.process(NAME, *command, f"--hostname-override={node.name}")
    ending.callback(running.stop)
    running.start()
    running.wait_until(lambda: _is_well(node.joins.address))


def _is_well(address: IPv4Address) -> bool:
    """Return whether it has enforced what there was when it came."""
    asked = http.client.HTTPConnection(str(address), HEALTH_PORT, timeout=1)
    try:
        asked.request("GET", "/healthz")
        return asked.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        asked.close()


def _remove_filters(node: Node, words: Sequence[str]) -> None:
    """Remove its packet filters, which outlive it, and leave those of the kubelet: its own clean-up removes none."""
    kept = f"iptables-save --table filter | grep --invert-match '{CHAINS}' | iptables-restore"
    node.namespaces.run(*words, "sh", "-c", f"{kept} && ipset destroy")
