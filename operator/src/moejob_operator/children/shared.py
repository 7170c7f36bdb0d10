"""The objects that all pods of a job share: Service, claim of checkpoints, Secret, and the policy of their network."""

from __future__ import annotations

from typing import Any

from moejob_api.contract import Label, Port
from moejob_operator.actions import Kind
from moejob_operator.children.blueprint import Blueprint, JobNetwork, metadata

# The key of the Secret whose value pods get as MOEJOB_SECRET.
SECRET_KEY = "secret"
# Labels of the chart's pods of the operator.
OPERATOR_LABELS = {"app.kubernetes.io/name": "moejob", "app.kubernetes.io/component": "operator"}


def service(blueprint: Blueprint) -> dict[str, Any]:
    """The headless Service: a DNS name for every pod."""
    return {
        "apiVersion": "v1",
        "kind": Kind.SERVICE.value,
        "metadata": metadata(blueprint, blueprint.service),
        "spec": {
            "clusterIP": "None",
            # Ranks meet before any of them is ready, and get ready only by meeting.
            "publishNotReadyAddresses": True,
            "selector": {Label.JOB.value: blueprint.name, Label.JOB_UID.value: blueprint.uid},
            "ports": [
                {"name": "progress", "port": Port.PROGRESS.value},
                {"name": "rendezvous", "port": Port.RENDEZVOUS.value},
            ],
        },
    }


def claim(blueprint: Blueprint) -> dict[str, Any] | None:
    """The claim; None when the job brings its own."""
    storage = blueprint.spec.storage
    if storage.claim_name is not None:
        return None
    return {
        "apiVersion": "v1",
        "kind": Kind.CLAIM.value,
        "metadata": metadata(blueprint, blueprint.claim),
        "spec": {
            "accessModes": [mode.value for mode in storage.access_modes],
            "resources": {"requests": {"storage": storage.size}},
            **({"storageClassName": storage.storage_class} if storage.storage_class is not None else {}),
        },
    }


def secret(blueprint: Blueprint) -> dict[str, Any]:
    """The Secret that the pods of a job ask one another for, without its data: the value is made as it is created.

    One for a job, for engines outlive attempts. Launchers derive the key of an attempt from it.
    """
    return {
        "apiVersion": "v1",
        "kind": Kind.SECRET.value,
        "metadata": metadata(blueprint, blueprint.access),
        "type": "Opaque",
        "immutable": True,
    }


def network_policy(blueprint: Blueprint) -> dict[str, Any] | None:
    """The policy that keeps all but the job's own pods away from them; None where the operator makes none."""
    if blueprint.network is None:
        return None
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": Kind.NETWORK_POLICY.value,
        "metadata": metadata(blueprint, blueprint.access),
        "spec": {
            "podSelector": _own(blueprint),
            "policyTypes": ["Ingress"],
            "ingress": [
                # All ports: gloo and NCCL listen on whichever are free.
                {"from": [{"podSelector": _own(blueprint)}]},
                {"from": _observers(blueprint.network), "ports": [{"port": Port.PROGRESS.value, "protocol": "TCP"}]},
            ],
        },
    }


def _own(blueprint: Blueprint) -> dict[str, Any]:
    return {"matchLabels": {Label.JOB_UID.value: blueprint.uid}}


def _observers(network: JobNetwork) -> list[dict[str, Any]]:
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": network.operator_namespace}},
        "podSelector": {"matchLabels": OPERATOR_LABELS},
    }
    return [operator, *map(dict, network.metrics_from)]
