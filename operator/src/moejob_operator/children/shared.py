"""The objects that all pods of a job share: Service, claim of checkpoints, Secret, and the policy of their network."""

from __future__ import annotations

from typing import Any

from moejob_api.contract.pods import Label, PodPort
from moejob_operator.actions import Kind
from moejob_operator.children.attempt import Attempt, JobNetwork, job_metadata

# The key of the Secret whose value pods get as MOEJOB_SECRET.
SECRET_KEY = "secret"
# Machines of clouds find their credentials at such addresses: of most clouds, of Azure's agent and of Alibaba's, and by
# IPv6 of AWS and of Google.
METADATA_ADDRESSES = {
    "0.0.0.0/0": ["169.254.0.0/16", "168.63.129.16/32", "100.100.100.200/32"],
    "::/0": ["fe80::/10", "fd00:ec2::254/128", "fd20:ce::254/128"],
}
# Labels of the chart's pods of the operator.
OPERATOR_LABELS = {"app.kubernetes.io/name": "moejob", "app.kubernetes.io/component": "operator"}


def service_manifest(attempt: Attempt) -> dict[str, Any]:
    """The headless Service: a DNS name for every pod."""
    return {
        "apiVersion": "v1",
        "kind": Kind.SERVICE.value,
        "metadata": job_metadata(attempt, attempt.service),
        "spec": {
            "clusterIP": "None",
            # Ranks meet before any of them is ready, and get ready only by meeting.
            "publishNotReadyAddresses": True,
            "selector": {Label.JOB.value: attempt.name, Label.JOB_UID.value: attempt.uid},
            "ports": [
                {"name": "progress", "port": PodPort.PROGRESS.value},
                {"name": "rendezvous", "port": PodPort.RENDEZVOUS.value},
            ],
        },
    }


def claim_manifest(attempt: Attempt) -> dict[str, Any] | None:
    """The claim; None when the job brings its own."""
    storage = attempt.spec.storage
    if storage.claim_name is not None:
        return None
    return {
        "apiVersion": "v1",
        "kind": Kind.CLAIM.value,
        "metadata": job_metadata(attempt, attempt.claim_name),
        "spec": {
            "accessModes": [mode.value for mode in storage.access_modes],
            "resources": {"requests": {"storage": storage.size}},
            **({"storageClassName": storage.storage_class} if storage.storage_class is not None else {}),
        },
    }


def secret_manifest(attempt: Attempt) -> dict[str, Any]:
    """The Secret by which pods of a job know each other, without its data: its creation makes the value.

    A job has one for all attempts, which engines outlive. Launchers derive the key of an attempt from it.
    """
    return {
        "apiVersion": "v1",
        "kind": Kind.SECRET.value,
        "metadata": job_metadata(attempt, attempt.access_name),
        "type": "Opaque",
        "immutable": True,
    }


def network_policy_manifest(attempt: Attempt) -> dict[str, Any] | None:
    """The policy of a job's pods: of connections to them, and from them where that is asked; None without policies."""
    if attempt.network is None:
        return None
    egress = _egress_rules(attempt, attempt.network) if attempt.network.bounds_egress else None
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": Kind.NETWORK_POLICY.value,
        "metadata": job_metadata(attempt, attempt.access_name),
        "spec": {
            "podSelector": _job_pod_selector(attempt),
            "policyTypes": ["Ingress"] if egress is None else ["Ingress", "Egress"],
            "ingress": [
                # All ports: gloo and NCCL listen on whichever are free.
                {"from": [{"podSelector": _job_pod_selector(attempt)}]},
                {
                    "from": _observer_peers(attempt.network),
                    "ports": [{"port": PodPort.PROGRESS.value, "protocol": "TCP"}],
                },
            ],
            **({} if egress is None else {"egress": egress}),
        },
    }


def _egress_rules(attempt: Attempt, network: JobNetwork) -> list[dict[str, Any]]:
    blocks = [{"ipBlock": {"cidr": cidr, "except": metadata}} for cidr, metadata in METADATA_ADDRESSES.items()]
    return [
        {"to": [{"podSelector": _job_pod_selector(attempt)}]},
        # To any address: a cache of names on each node has one of the addresses that are closed otherwise.
        {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
        # The Hugging Face hub, object stores and trackers.
        {"to": blocks, "ports": [{"port": 443, "protocol": "TCP"}]},
        *map(dict, network.egress_rules),
    ]


def _job_pod_selector(attempt: Attempt) -> dict[str, Any]:
    return {"matchLabels": {Label.JOB_UID.value: attempt.uid}}


def _observer_peers(network: JobNetwork) -> list[dict[str, Any]]:
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": network.operator_namespace}},
        "podSelector": {"matchLabels": OPERATOR_LABELS},
    }
    return [operator, *map(dict, network.metrics_from)]
