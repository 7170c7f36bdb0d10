"""Volumes that no pod ever mounts, for claims that have to be bound."""

from __future__ import annotations

from typing import Any

from cluster.control_plane.plane import ControlPlane
from cluster.waiting import until

VOLUMES = "/api/v1/persistentvolumes"


def volume_for(claim: dict[str, Any]) -> dict[str, Any]:
    """A volume for this claim and no other."""
    about, spec = claim["metadata"], claim["spec"]
    return {
        "metadata": {"name": f"{about['namespace']}-{about['uid']}"},
        "spec": {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "hostPath": {"path": "/nowhere"},
            "claimRef": {"namespace": about["namespace"], "name": about["name"]},
        },
    }


def create_bound_claim(plane: ControlPlane, namespace: str, name: str) -> None:
    """A claim with a volume, as a person brings it along."""
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}, "storageClassName": ""}
    claim = plane.api.create(claims, {"metadata": {"name": name}, "spec": spec})
    plane.api.create(VOLUMES, volume_for(claim))
    until(
        lambda: plane.api.get(f"{claims}/{name}")["status"]["phase"] == "Bound",
        waiting_for=f"claim {name} to be bound",
    )
