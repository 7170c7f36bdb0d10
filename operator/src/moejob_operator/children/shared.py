"""What all pods of a job share: the Service that gives them names, and the claim that checkpoints live on."""

from __future__ import annotations

from typing import Any

from moejob_api.contract import Label, Port
from moejob_operator.actions import Kind
from moejob_operator.children.blueprint import Blueprint, metadata


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
