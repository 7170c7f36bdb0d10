"""The mounts of a pod: the job's volume, claims that its sources name, shared memory and a writable /tmp."""

from __future__ import annotations

from typing import Any

from moejob_api.contract.pods import PodPath, PodRole
from moejob_api.job.claims import named_claims
from moejob_operator.children.attempt import Attempt

_STORAGE = "storage"
# Compiled kernels take a few GiB. Without a limit one pod fills its node's disk, and the kubelet evicts others for it.
_TEMPORARY_SIZE = "100Gi"


def pod_volumes(attempt: Attempt, role: PodRole) -> list[dict[str, Any]]:
    """The volumes of a pod."""
    shared = {"medium": "Memory", "sizeLimit": attempt.pod_resources[role].shared_memory}
    return [
        {"name": "shared-memory", "emptyDir": shared},
        {"name": "temporary", "emptyDir": {"sizeLimit": _TEMPORARY_SIZE}},
        *(
            {"name": name, "persistentVolumeClaim": {"claimName": claim}}
            for claim, name in _claim_volumes(attempt).items()
        ),
    ]


def volume_mounts(attempt: Attempt) -> list[dict[str, Any]]:
    """Return the mount paths in the container. A volume that a source names is read-only."""
    storage = attempt.spec.storage.mount_path
    return [
        {"name": "shared-memory", "mountPath": PodPath.SHARED_MEMORY.value},
        {"name": "temporary", "mountPath": PodPath.TEMPORARY.value},
        {"name": _STORAGE, "mountPath": storage},
        *(
            {"name": _claim_volumes(attempt)[claim], "mountPath": f"{PodPath.CLAIMS.value}/{claim}", "readOnly": True}
            for claim in named_claims(attempt.spec)
        ),
    ]


def _claim_volumes(attempt: Attempt) -> dict[str, str]:
    """Map claims to volumes. The job's claim is one volume, even as a source: a node may not attach it twice."""
    source_claims = (claim for claim in named_claims(attempt.spec) if claim != attempt.claim_name)
    return {attempt.claim_name: _STORAGE} | {claim: f"claim-{number}" for number, claim in enumerate(source_claims)}
