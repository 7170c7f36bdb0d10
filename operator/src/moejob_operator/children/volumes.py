"""The mounts of a pod: the job's volume, claims that its sources name, shared memory and a writable /tmp."""

from __future__ import annotations

from typing import Any

from moejob_api.contract.pods import Path
from moejob_api.job.claims import named_claims
from moejob_operator.children.attempt import Attempt

_STORAGE = "storage"
# Compiled kernels take a few GiB. Without a limit one pod fills its node's disk, and the kubelet evicts others for it.
_TEMPORARY_SIZE = "100Gi"


def volumes(attempt: Attempt) -> list[dict[str, Any]]:
    """The volumes of a pod."""
    shared = {"medium": "Memory", "sizeLimit": attempt.spec.resources.shared_memory}
    return [
        {"name": "shared-memory", "emptyDir": shared},
        {"name": "temporary", "emptyDir": {"sizeLimit": _TEMPORARY_SIZE}},
        *({"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in _claims(attempt).items()),
    ]


def mounts(attempt: Attempt) -> list[dict[str, Any]]:
    """Return the mount paths in the container. A volume that a source names is read-only."""
    storage = attempt.spec.storage.mount_path
    return [
        {"name": "shared-memory", "mountPath": Path.SHARED_MEMORY.value},
        {"name": "temporary", "mountPath": Path.TEMPORARY.value},
        {"name": _STORAGE, "mountPath": storage},
        *(
            {"name": _claims(attempt)[claim], "mountPath": f"{Path.CLAIMS.value}/{claim}", "readOnly": True}
            for claim in named_claims(attempt.spec)
        ),
    ]


def _claims(attempt: Attempt) -> dict[str, str]:
    """Map claims to volumes. The job's claim is one volume, even as a source: a node may not attach it twice."""
    others = (claim for claim in named_claims(attempt.spec) if claim != attempt.claim)
    return {attempt.claim: _STORAGE} | {claim: f"claim-{number}" for number, claim in enumerate(others)}
