"""The real Cluster: reads come from the cache, everything else goes through the API server and the pods' HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any
from uuid import uuid4

from moejob_api.contract.pods import PodProgress
from moejob_api.job import KIND
from moejob_api.profiles.reading import TrainingProfile
from moejob_client.api_client import ApiClient
from moejob_client.errors import AlreadyExists, NotFound
from moejob_operator.actions import WRITE_ONLY, Event, Kind, Manifest, ObjectReference
from moejob_operator.children.shared import SECRET_KEY
from moejob_operator.cluster import Children, Conflict, Forbidden, JobKey, NameInTheWay, Raw, Retryable
from moejob_operator.kube_api.cache import CHILD_KINDS, Cache
from moejob_operator.kube_api.live_lists import JOBS, LiveLists, collection_path
from moejob_operator.kube_api.pod_client import MutePod, PodClient
from moejob_operator.kube_api.profiles import find_profile
from moejob_operator.logs import Log
from moejob_operator.observed import is_as_made, is_taken_by_taint, is_unheard

log = Log(__name__)

# The API server refuses more.
_NOTE_BYTES = 1024
_SECRET_BYTES = 32
_REPORTER = "moejob.dev/operator"
# The API server answers 500 for the webhook of another product that it cannot reach.
_WEBHOOK_DOWN = "failed calling webhook"


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    """Implements moejob_operator.cluster.Cluster.

    `remaining_seconds` returns for how long this process may still write, `clock` the time in UTC.
    """

    api: ApiClient
    cache: Cache
    lists: LiveLists
    pods: PodClient
    identity: str
    remaining_seconds: Callable[[], float]
    on_status_written: Callable[[Mapping[str, Any], Mapping[str, Any]], None]
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    # --- reading --------------------------------------------------------------------------------------------------

    async def get_job(self, key: JobKey) -> Raw | None:
        """The job as the watches and our own writes last showed it; an older one cannot be written anyway."""
        return self.cache.find_job(key)

    async def find_profile(self, namespace: str, name: str) -> TrainingProfile | None:
        """Ask for the profile: a job asks once, so a watch of profiles would cost more than it saves."""
        return await find_profile(self.api, namespace, name)

    async def list_children(self, key: JobKey, *, live: bool) -> Children:
        """Return them from the cache, or list them now, which also updates the cache."""
        if live:
            pods, services, claims, groups = await asyncio.gather(
                *(self.lists.list_of_job(kind, key) for kind in CHILD_KINDS)
            )
            children = Children(pods, services, claims, groups)
        else:
            children = self.cache.find_children(key)
        doubted = {node for pod in children.pods if (node := _doubted_node(pod, self.clock())) is not None}
        lost = [node for node in sorted(doubted) if await self._is_node_lost(node)]
        return replace(children, lost_nodes=frozenset(lost))

    async def _is_node_lost(self, node: str) -> bool:
        """Return whether a node is gone, or has been silent for so long that the cluster reports it."""
        try:
            node_body = await self.api.get(f"/api/v1/nodes/{node}")
        except NotFound:
            return True
        except Forbidden as error:
            # An operator for one namespace may have no right to nodes: its pods then wait for a person.
            log.warning("cannot see whether a node is lost", node=node, error=str(error))
            return False
        conditions = (node_body.get("status") or {}).get("conditions") or ()
        return any(condition["type"] == "Ready" and condition["status"] == "Unknown" for condition in conditions)

    async def get_progress(self, pod: Raw) -> PodProgress | None:
        """Return the reply on the pod's progress port. Its author may be anyone, so every field is validated."""
        address = (pod.get("status") or {}).get("podIP")
        if not address:
            return None
        try:
            return await self.pods.get_progress(address)
        except MutePod as error:
            log.debug("a pod says nothing", pod=pod["metadata"]["name"], error=str(error))
            return None

    # --- writing --------------------------------------------------------------------------------------------------

    async def ensure(self, manifest: Manifest) -> None:
        """Create an object. An existing one counts when it looks as created, or when no other job can have its name."""
        kind, metadata = Kind(manifest["kind"]), manifest["metadata"]
        path = collection_path(kind, metadata["namespace"], manifest["apiVersion"])
        try:
            created = await self.api.create(path, _fill_secret(manifest), within=self._write_seconds())
        except AlreadyExists:
            if kind in WRITE_ONLY:
                return
            self.cache.record_object(kind, await self._get_owned(f"{path}/{metadata['name']}", manifest))
            return
        except Conflict as conflict:
            # Two clients used a quota at once; no object has changed.
            raise Retryable(str(conflict)) from conflict
        except NotFound as absent:
            raise Forbidden(f"{kind} {metadata['name']} cannot be created: {absent}") from absent
        except Retryable as failure:
            # A user can only repair a webhook that is down once the status names it.
            if _WEBHOOK_DOWN in str(failure):
                raise Forbidden(str(failure)) from failure
            raise
        if kind in WRITE_ONLY:
            return
        # The watch brings what a kubelet or a controller adds.
        self.cache.record_object(kind, {**manifest, "metadata": created["metadata"]})

    async def is_missing(self, manifest: Manifest) -> bool:
        """Check by a dry run of the creation: a right to read Secrets would cover all Secrets."""
        kind, metadata = Kind(manifest["kind"]), manifest["metadata"]
        try:
            await self.api.try_to_create(collection_path(kind, metadata["namespace"], manifest["apiVersion"]), manifest)
        except (AlreadyExists, NotFound, Conflict, Forbidden):
            return False
        return True

    async def _get_owned(self, path: str, manifest: Manifest) -> Raw:
        try:
            existing = await self.api.get(path)
        except NotFound as absent:
            raise Retryable(f"{path} was there and is gone") from absent
        if is_as_made(existing, manifest):
            return existing
        raise NameInTheWay(manifest)

    async def delete(self, ref: ObjectReference, *, grace_seconds: int | None) -> None:
        """Delete the object of this name and UID; a grace of 0 does not wait for a kubelet."""
        options = {
            "preconditions": {"uid": ref.uid},
            "propagationPolicy": "Background",
        } | ({} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds})
        for api in self._apis_of(ref):
            try:
                reply = await self.api.delete(
                    f"{collection_path(ref.kind, ref.namespace, api)}/{ref.name}", options, within=self._write_seconds()
                )
            except (NotFound, Conflict):
                # Gone, or another object by now, which is none of our business.
                continue
            # An object that ends slowly comes back with its deletion time; the watch reports one that is gone. An
            # object that another client deleted at the same moment comes back without its version.
            cached = self.cache.find_object(ref.kind, ref.namespace, ref.name)
            metadata = reply.get("metadata") or {}
            if cached is not None and metadata.get("uid") == ref.uid and metadata.get("resourceVersion"):
                self.cache.record_object(ref.kind, {**cached, "metadata": metadata})

    def _apis_of(self, ref: ObjectReference) -> tuple[str, ...]:
        if ref.kind is not Kind.POD_GROUP:
            return ("",)
        cached = self.cache.find_object(ref.kind, ref.namespace, ref.name)
        return self.lists.gangs.apis_with_objects if cached is None else (cached["apiVersion"],)

    async def write_status(self, job: Raw, status: Raw) -> None:
        """Replace the status. PUT, not a patch: fields that the new status lacks must go.

        The API server takes only the status from this body, so it needs no spec; version and UID detect a changed job.
        """
        metadata = job["metadata"]
        body = {
            "apiVersion": JOBS,
            "kind": KIND,
            "metadata": {name: metadata[name] for name in ("name", "namespace", "uid", "resourceVersion")},
            "status": status,
        }
        path = f"{collection_path(Kind.JOB, metadata['namespace'])}/{metadata['name']}/status"
        try:
            reply = await self.api.replace(path, body, within=self._write_seconds())
        except NotFound as absent:
            raise Conflict(f"the job is gone: {absent}") from absent
        self.cache.record_object(Kind.JOB, {**job, "metadata": reply["metadata"], "status": status})
        self.on_status_written(job.get("status") or {}, status)

    async def post_event(self, job: Raw, event: Event) -> None:
        """Post an event; one that is lost is not posted again."""
        metadata, now = job["metadata"], self.clock()
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": _event_name(metadata["name"], now), "namespace": metadata["namespace"]},
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": _REPORTER,
            "reportingInstance": self.identity[:128],
            "action": event.reason,
            "reason": event.reason,
            "type": event.severity,
            "note": event.message.encode()[:_NOTE_BYTES].decode(errors="ignore"),
            "regarding": {
                "apiVersion": JOBS,
                "kind": KIND,
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        }
        try:
            await self.api.create(
                f"/apis/events.k8s.io/v1/namespaces/{metadata['namespace']}/events", body, within=self._write_seconds()
            )
        except (NotFound, Conflict, AlreadyExists, Forbidden, Retryable) as error:
            log.info("an event was not posted", job=metadata["name"], reason=event.reason, error=str(error))

    def _write_seconds(self) -> float:
        """Return the seconds that a write may take: none may be under way when another replica can lead."""
        remaining = self.remaining_seconds()
        if remaining <= 0:
            raise Retryable("this replica does not lead any more")
        return remaining


def _fill_secret(manifest: Manifest) -> Manifest:
    """Give a Secret its value, which is kept nowhere else."""
    if manifest["kind"] != Kind.SECRET:
        return manifest
    return {**manifest, "stringData": {SECRET_KEY: token_hex(_SECRET_BYTES)}}


def _event_name(job: str, now: datetime) -> str:
    """Return a name that sorts by time: kubectl lists events of this API, also in `describe`, by name."""
    return f"{job}.{round(now.timestamp() * 1e6):014x}{uuid4().hex[:8]}"


def _doubted_node(pod: Raw, now: datetime) -> str | None:
    """The node of a pod whose kubelet may be gone: the cluster says so, or it should have ended the pod by now."""
    node: str | None = (pod.get("spec") or {}).get("nodeName")
    until = pod["metadata"].get("deletionTimestamp")
    is_overdue = until is not None and datetime.fromisoformat(until) < now
    return node if node and (is_overdue or is_unheard(pod) or is_taken_by_taint(pod)) else None
