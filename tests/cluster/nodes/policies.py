"""NetworkPolicies, enforced on the nodes by packet filters that follow from what the API server holds.

The nodes' network is a bridge that enforces none. `make test-policies` has kube-router enforce those of a job
(kube_router), which takes minutes of two cores to build. This one decides for ingress as the documentation of the API
does: a pod that a policy selects is reached only from where one of its policies allows it, and from its own node. A pod
that is refused gets an error at once, and another one than of a port on which nothing listens. Knows nothing of jobs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.nodes.cluster import Cluster
from cluster.waiting import until

Body = Mapping[str, Any]
TABLE = "policies"
# As often as that the API server is asked what there is: an engine that watches is about as late.
LOOK_SECONDS = 0.2
REFUSAL = "reject with icmp type admin-prohibited"


class UnknownPolicyError(Exception):
    """A policy says something that is not enforced here; to go on without it would prove nothing."""


@dataclass(frozen=True, slots=True)
class PodAddress:
    """A pod that has an address."""

    namespace: str
    labels: Mapping[str, str]
    address: str
    # By their names.
    ports: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All that filters follow from."""

    policies: Sequence[Body]
    pods: Sequence[PodAddress]
    # Labels of each.
    namespaces: Mapping[str, Mapping[str, str]]


def build_filters(view: ClusterView) -> str:
    """The packet filters of every node, in the words of nft; each node forwards to its own pods alone."""
    isolated: dict[str, list[str]] = {}
    for policy in view.policies:
        for pod in _selected_pods(policy, view.pods):
            isolated.setdefault(pod.address, []).extend(_allow_rules(policy, pod, view))
    rules = [f"ip daddr {address} {allowed}" for address, ways in isolated.items() for allowed in ways]
    refused = [f"ip daddr {{ {', '.join(isolated)} }} {REFUSAL}"] if isolated else []
    lines = ["type filter hook forward priority filter; policy accept;", "ct state established,related accept"]
    chain = "\n".join(f"    {line}" for line in (*lines, *rules, *refused))
    return f"table ip {TABLE}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n  chain forward {{\n{chain}\n  }}\n}}\n"


def _selected_pods(policy: Body, pods: Iterable[PodAddress]) -> Iterator[PodAddress]:
    spec, namespace = policy["spec"], policy["metadata"]["namespace"]
    if "Ingress" not in spec["policyTypes"]:
        raise UnknownPolicyError(f"{policy['metadata']['name']} is not for ingress, which alone is enforced here")
    return (pod for pod in pods if pod.namespace == namespace and matches(spec["podSelector"], pod.labels))


def _allow_rules(policy: Body, pod: PodAddress, view: ClusterView) -> Iterator[str]:
    for rule in policy["spec"].get("ingress", ()):
        sources = _source_addresses(policy, rule, view)
        # Peers that are named and have no pod are no one, and no peers named are everybody.
        if sources is not None and not sources:
            continue
        origin = "" if sources is None else f"ip saddr {{ {', '.join(sources)} }} "
        ports = rule.get("ports")
        for way in [""] if ports is None else [_match_port(port, pod) for port in ports]:
            yield f"{origin}{way}accept"


def _source_addresses(policy: Body, rule: Body, view: ClusterView) -> list[str] | None:
    peers = rule.get("from")
    if not peers:
        return None
    own_namespace = policy["metadata"]["namespace"]
    return sorted({pod.address for pod in view.pods if any(_is_peer(peer, pod, own_namespace, view) for peer in peers)})


def _is_peer(peer: Body, pod: PodAddress, own_namespace: str, view: ClusterView) -> bool:
    if peer.keys() - {"podSelector", "namespaceSelector"}:
        raise UnknownPolicyError(f"a peer {dict(peer)} is more than pods of namespaces")
    spaces = peer.get("namespaceSelector")
    if spaces is None and pod.namespace != own_namespace:
        return False
    if spaces is not None and not matches(spaces, view.namespaces.get(pod.namespace, {})):
        return False
    return matches(peer.get("podSelector", {}), pod.labels)


def _match_port(port: Body, pod: PodAddress) -> str:
    number = port.get("port")
    if "endPort" in port or number is None:
        raise UnknownPolicyError(f"ports {dict(port)} are not one port")
    port_number = number if isinstance(number, int) else pod.ports[number]
    return f"{port.get('protocol', 'TCP').lower()} dport {port_number} "


def matches(selector: Body, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector of the API selects these labels; an empty one selects all."""
    if "matchExpressions" in selector:
        raise UnknownPolicyError(f"expressions are not read here: {dict(selector)}")
    required_labels: Mapping[str, str] = selector.get("matchLabels", {})
    return required_labels.items() <= labels.items()


class PolicyEnforcer:
    """Looks at a cluster again and again, and gives its nodes the filters that follow."""

    def __init__(self, nodes: Cluster) -> None:
        self._nodes = nodes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="policies")
        self._applied = ""
        self._looks = 0
        self._failure: Exception | None = None

    def start(self) -> None:
        """Return when what there is now is enforced."""
        self._thread.start()
        self.catch_up()

    def catch_up(self) -> None:
        """Return when all is enforced that the API server held when this was called."""
        # The look that is under way may have begun before.
        target_looks = self._looks + 2
        until(lambda: self._looks >= target_looks or self._failure is not None, waiting_for="packet filters")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Enforce nothing any more."""
        self._stop.set()
        self._thread.join()
        self._apply_filters(build_filters(ClusterView((), (), {})))

    def _run(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                self._apply_filters(build_filters(self._view_cluster()))
                self._looks += 1
        except Exception as failure:  # noqa: BLE001  raised where it is waited for
            self._failure = failure

    def _apply_filters(self, filters: str) -> None:
        if filters == self._applied:
            return
        for node in self._nodes.nodes.values():
            node.filter_packets(filters)
        self._applied = filters

    def _view_cluster(self) -> ClusterView:
        get = self._nodes.plane.api.get
        policies = get("/apis/networking.k8s.io/v1/networkpolicies")["items"]
        namespaces = get("/api/v1/namespaces")["items"]
        pods = get("/api/v1/pods")["items"]
        return ClusterView(
            policies,
            [_pod_address(pod) for pod in pods if _has_address(pod)],
            {namespace["metadata"]["name"]: namespace["metadata"].get("labels", {}) for namespace in namespaces},
        )


def _has_address(pod: Body) -> bool:
    """An address of a pod that has ended is another's, or soon will be."""
    return bool(pod["status"].get("podIP")) and pod["status"]["phase"] not in ("Succeeded", "Failed")


def _pod_address(pod: Body) -> PodAddress:
    containers = pod["spec"]["containers"]
    ports = {
        port["name"]: port["containerPort"]
        for container in containers
        for port in container.get("ports", ())
        if "name" in port
    }
    metadata = pod["metadata"]
    return PodAddress(metadata["namespace"], metadata.get("labels", {}), pod["status"]["podIP"], ports)


@contextmanager
def enforce_policies(nodes: Cluster) -> Iterator[PolicyEnforcer]:
    """Policies hold on the nodes of a cluster."""
    enforcer = PolicyEnforcer(nodes)
    enforcer.start()
    try:
        yield enforcer
    finally:
        enforcer.stop()
