"""The programs of a control plane: with which flags each is started, and where it says that it is well."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cluster.control_plane.certificates import Authority, KeyPair, new_authority, new_signing_key
from cluster.control_plane.kubeconfigs import Server, write_for_certificate

HERE = Path(__file__).parent
LOOPBACK = "127.0.0.1"
SERVICES = "10.96.0.0/16"
# The API server, as pods find it: the first of the services.
SERVICE = "10.96.0.1"
NAMES = "DNS:localhost,DNS:kubernetes.default.svc"
# Gang scheduling by Kubernetes itself.
FEATURE_GATES = "GenericWorkload=true,GangScheduling=true,TopologyAwareWorkloadScheduling=true"
# Else the scheduler tries a gang that waits again and again without a pause, for more than a core.
NO_HASTE = "SchedulerPopFromBackoffQ=false"
RUNTIME_CONFIG = "scheduling.k8s.io/v1alpha2=true"
# Below the ports that the kernel gives to outgoing connections: one of those could take the port of a component that
# is about to start, or to start again.
PORTS = range(20_000, 30_000)


class Component(StrEnum):
    """One program of the control plane, by its name."""

    ETCD = "etcd"
    API_SERVER = "kube-apiserver"
    CONTROLLER_MANAGER = "kube-controller-manager"
    SCHEDULER = "kube-scheduler"
    KWOK = "kwok"


# User and group as which a component speaks to the API server.
USERS: Mapping[Component, tuple[str, str | None]] = {
    Component.CONTROLLER_MANAGER: ("system:kube-controller-manager", None),
    Component.SCHEDULER: ("system:kube-scheduler", None),
    Component.KWOK: ("kwok", "system:masters"),
}


@dataclass(frozen=True, slots=True)
class Site:
    """Files and ports of one control plane."""

    folder: Path
    authority: Authority
    admin: KeyPair
    serving: KeyPair
    kubelet_client: KeyPair
    token_key: Path
    ports: Mapping[Component, int]
    etcd_peer_port: int
    # Where the API server is reached: loopback, unless nodes and pods have to reach it.
    address: str

    @property
    def server(self) -> Server:
        """The API server, as its clients know it."""
        return Server(f"https://{self.address}:{self.ports[Component.API_SERVER]}", self.authority.own.certificate)

    @property
    def etcd_url(self) -> str:
        """Return where the API server finds etcd."""
        return f"http://{LOOPBACK}:{self.ports[Component.ETCD]}"

    @property
    def audit_log(self) -> Path:
        """One JSON object a line for each answer of the API server."""
        return self.folder / "audit.jsonl"

    def kubeconfig(self, component: Component) -> Path:
        """With what a component speaks to the API server."""
        return self.folder / f"{component}.kubeconfig"


def new_site(folder: Path, address: str = LOOPBACK) -> Site:
    """Free ports, and certificates and kubeconfigs for every component, in the folder."""
    authority = new_authority(folder / "certificates")
    peer_port, *ports = _free_ports(1 + len(Component))
    site = Site(
        folder=folder,
        authority=authority,
        admin=authority.client("admin", group="system:masters"),
        serving=authority.server("serving", f"{NAMES},IP:{LOOPBACK},IP:{SERVICE},IP:{address}"),
        kubelet_client=authority.client("kube-apiserver", group="system:masters"),
        token_key=new_signing_key(authority.folder / "tokens.key"),
        ports=dict(zip(Component, ports, strict=True)),
        etcd_peer_port=peer_port,
        address=address,
    )
    for component, (user, group) in USERS.items():
        write_for_certificate(site.kubeconfig(component), site.server, authority.client(user, group))
    return site


def flags(component: Component, site: Site, changed: Mapping[str, object]) -> list[str]:
    """The flags of a component, with those that a test overrides."""
    return [f"--{name}={value}" for name, value in {**FLAGS[component](site), **changed}.items()]


def health_url(component: Component, site: Site) -> str:
    """Return what answers 200 once the component does its work."""
    is_plain = component in (Component.ETCD, Component.KWOK)
    # The controller manager knows no readyz.
    path = "healthz" if component in (Component.CONTROLLER_MANAGER, Component.KWOK) else "readyz"
    address = site.address if component is Component.API_SERVER else LOOPBACK
    return f"{'http' if is_plain else 'https'}://{address}:{site.ports[component]}/{path}"


def _etcd(site: Site) -> dict[str, object]:
    peer_url = f"http://{LOOPBACK}:{site.etcd_peer_port}"
    return {
        "data-dir": site.folder / "etcd",
        "listen-client-urls": site.etcd_url,
        "advertise-client-urls": site.etcd_url,
        "listen-peer-urls": peer_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": f"default={peer_url}",
        "log-level": "warn",
        # A crash of the machine may cost the data of a test.
        "unsafe-no-fsync": "true",
    }


def _api_server(site: Site) -> dict[str, object]:
    return (
        _serving(site, Component.API_SERVER)
        | _reach(site)
        | {
            "etcd-servers": site.etcd_url,
            "client-ca-file": site.authority.own.certificate,
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": site.token_key,
            "service-account-signing-key-file": site.token_key,
            "service-cluster-ip-range": SERVICES,
            "allow-privileged": "true",
            "feature-gates": FEATURE_GATES,
            "runtime-config": RUNTIME_CONFIG,
            "audit-policy-file": HERE / "audit_policy.yaml",
            "audit-log-path": site.audit_log,
        }
    )


def _reach(site: Site) -> dict[str, object]:
    """Return where pods find the API server, and how it finds kubelets and pods."""
    if site.address == LOOPBACK:
        # The service `kubernetes` would need an address that is not loopback.
        return {"endpoint-reconciler-type": "none"}
    return {
        "bind-address": site.address,
        "advertise-address": site.address,
        "kubelet-client-certificate": site.kubelet_client.certificate,
        "kubelet-client-key": site.kubelet_client.key,
        "kubelet-preferred-address-types": "InternalIP",
        # No kube-proxy runs beside it: it asks the pods of a webhook themselves, not their Service.
        "enable-aggregator-routing": "true",
    }


def _controller_manager(site: Site) -> dict[str, object]:
    return _delegating(site, Component.CONTROLLER_MANAGER) | {
        "service-account-private-key-file": site.token_key,
        "root-ca-file": site.authority.own.certificate,
        "use-service-account-credentials": "true",
        "kube-api-qps": 200,
        "kube-api-burst": 400,
        # A claim waits for its volume as long as this, 15 s otherwise.
        "pvclaimbinder-sync-period": "1s",
    }


def _scheduler(site: Site) -> dict[str, object]:
    return _delegating(site, Component.SCHEDULER) | {
        "kube-api-qps": 500,
        "kube-api-burst": 1000,
        "feature-gates": f"{FEATURE_GATES},{NO_HASTE}",
    }


def _kwok(site: Site) -> dict[str, object]:
    return {
        "kubeconfig": site.kubeconfig(Component.KWOK),
        "config": HERE / "stages.yaml",
        "manage-nodes-with-label-selector": "kwok.x-k8s.io/node=fake",
        # Leases would belong to the kwok that crashed for as long as they last; stages.yaml keeps nodes alive instead.
        "node-lease-duration-seconds": 0,
        "server-address": f"{LOOPBACK}:{site.ports[Component.KWOK]}",
    }


FLAGS: Mapping[Component, Callable[[Site], dict[str, object]]] = {
    Component.ETCD: _etcd,
    Component.API_SERVER: _api_server,
    Component.CONTROLLER_MANAGER: _controller_manager,
    Component.SCHEDULER: _scheduler,
    Component.KWOK: _kwok,
}


def _serving(site: Site, component: Component) -> dict[str, object]:
    return {
        "bind-address": LOOPBACK,
        "secure-port": site.ports[component],
        "tls-cert-file": site.serving.certificate,
        "tls-private-key-file": site.serving.key,
        "profiling": "false",
    }


def _delegating(site: Site, component: Component) -> dict[str, object]:
    """Return what the controller manager and the scheduler, each a client and a server, have in common."""
    kubeconfig = site.kubeconfig(component)
    return _serving(site, component) | {
        "kubeconfig": kubeconfig,
        "authentication-kubeconfig": kubeconfig,
        "authorization-kubeconfig": kubeconfig,
        "leader-elect": "false",
        "feature-gates": FEATURE_GATES,
    }


def _free_ports(count: int) -> list[int]:
    free = (port for port in random.sample(PORTS, len(PORTS)) if _is_free(port))
    return [next(free) for _ in range(count)]


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
