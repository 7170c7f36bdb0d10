"""The cluster as a reconcile sees it: the one seam between deciding and the API server.

Two implementations: the API server through moejob_client, and FakeCluster in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from moejob_api.contract.pods import PodProgress
from moejob_api.profiles.reading import TrainingProfile
from moejob_client.errors import Conflict, Forbidden, Retryable
from moejob_operator.actions import Event, Manifest, ObjectReference

__all__ = [
    "Children",
    "Cluster",
    "Conflict",
    "Forbidden",
    "JobKey",
    "NameInTheWay",
    "Raw",
    "Retryable",
]

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class JobKey:
    """The namespace and name of a job: the key of the work queue."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Children:
    """Raw objects that belong to one job."""

    pods: tuple[Raw, ...]
    services: tuple[Raw, ...]
    claims: tuple[Raw, ...]
    pod_groups: tuple[Raw, ...]
    # Nodes that are gone or silent. Only on these may a pod be deleted without its kubelet's consent.
    lost_nodes: frozenset[str] = frozenset()


class NameInTheWay(Forbidden):
    """Another client's object has a name that the job needs: the operator neither trusts nor changes the object."""

    def __init__(self, manifest: Manifest) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        super().__init__(
            f"a {kind} {name} is in the way, which this job did not create; delete it, or create the job under another "
            "name"
        )


class Cluster(Protocol):
    """The reads and writes of a reconcile. Every method raises Retryable when the API server does not answer."""

    async def get_job(self, key: JobKey) -> Raw | None:
        """The job as it is now; None when it is gone."""

    async def find_profile(self, namespace: str, name: str) -> TrainingProfile | None:
        """The profile that a job of a namespace means by a name: the namespace's own, or else the cluster's."""

    async def list_children(self, key: JobKey, *, live: bool) -> Children:
        """The job's objects: from the watch cache, or listed now, as before an action that cannot be undone."""

    async def ensure(self, manifest: Manifest) -> None:
        """Create an object. An existing one that looks as created is fine; another client's is Forbidden."""

    async def is_missing(self, manifest: Manifest) -> bool:
        """Return whether a write-only object is missing; False where that cannot be known."""

    async def delete(self, ref: ObjectReference, *, grace_seconds: int | None) -> None:
        """Delete the object with exactly this UID; a missing or replaced object is no error."""

    async def write_status(self, job: Raw, status: Raw) -> None:
        """Write the status of the job as it was read; Conflict when it changed since."""

    async def post_event(self, job: Raw, event: Event) -> None:
        """Post an event about the job; losing one is no error."""

    async def get_progress(self, pod: Raw) -> PodProgress | None:
        """Return the progress that a pod reports; None without a readable reply in time."""
