"""The settings of what joins a node to a cluster: kubelet, kube-proxy, pod network; knows not how they are started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from cluster.nodes.runtime import SOCKET

HEALTH_PORT = 10248
DOMAIN = "cluster.local"


@dataclass(frozen=True, slots=True)
class Membership:
    """The configuration of a node: the cluster that it joins, and its place in it."""

    name: str
    address: IPv4Address
    pods: IPv4Network
    all_pods: IPv4Network
    dns: IPv4Address
    cgroup: str
    ca: Path
    kubeconfig: Path
    proxy_kubeconfig: Path


def write_kubelet_settings(path: Path, joins: Membership) -> Path:
    """Return the kubelet's configuration file."""
    settings = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(joins.ca)},
        },
        "authorization": {"mode": "Webhook"},
        "healthzBindAddress": str(joins.address),
        "healthzPort": HEALTH_PORT,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{joins.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "clusterDNS": [str(joins.dns)],
        "clusterDomain": DOMAIN,
        # Pods know nothing of the machine's own names.
        "resolvConf": "",
        # The nodes share a disk with all else on the machine: how full it is says nothing about them.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        # A node that is silent is lost after 20 s: see LOST_SECONDS of the cluster.
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 20,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "registryPullQPS": 0,
        "serializeImagePulls": False,
        # Images that pods bring along are no secret of theirs.
        "imagePullCredentialsVerificationPolicy": "NeverVerify",
        # A crash is tried again after no more than a few seconds.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "5s"},
    }
    path.write_text(json.dumps(settings, indent=2))
    return path


def kubelet_flags(settings: Path, joins: Membership) -> list[str]:
    """Return the kubelet's flags."""
    return [
        f"--config={settings}",
        f"--kubeconfig={joins.kubeconfig}",
        f"--hostname-override={joins.name}",
        f"--node-ip={joins.address}",
    ]


def health_url(joins: Membership) -> str:
    """Return what answers 200 while the kubelet is well."""
    return f"http://{joins.address}:{HEALTH_PORT}/healthz"


def proxy_flags(joins: Membership) -> list[str]:
    """kube-proxy, by packet filters of the node's own network."""
    return [
        f"--kubeconfig={joins.proxy_kubeconfig}",
        f"--hostname-override={joins.name}",
        "--proxy-mode=nftables",
        f"--cluster-cidr={joins.all_pods}",
        # The limits of connection tracking belong to the machine.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
    ]


def write_pod_network(folder: Path, joins: Membership) -> Path:
    """A bridge on the node for its pods, with addresses of its own range."""
    folder.mkdir()
    ranges = [[{"subnet": str(joins.pods)}]]
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]},
    }
    network = {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}
    (folder / "10-pods.conflist").write_text(json.dumps(network, indent=2))
    return folder
