"""The cache of the watches: the newest known state of every job and of what belongs to it. Never asks, never waits.

Watches, lists and replies to our own writes feed it in any order: the newer of two versions stays, and a deleted UID
does not come back.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moejob_api.contract.pods import Label
from moejob_operator.actions import Kind
from moejob_operator.cluster import Children, JobKey, Raw

CHILD_KINDS = (Kind.POD, Kind.SERVICE, Kind.CLAIM, Kind.POD_GROUP)
# Longer than a response takes to arrive and to be read, also under load.
_LATE_SECONDS = 60.0

# The rest of a pod's spec is what we wrote ourselves; kept for 10,000 pods it would be most of our memory.
_KEPT_OF_POD = (
    "nodeName",
    "schedulerName",
    "schedulingGates",
    "subdomain",
    "priorityClassName",
    "terminationGracePeriodSeconds",
)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


class Cache:
    """Objects by kind, and which job they belong to."""

    def __init__(self, request_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`request_seconds` bounds a request: that and a minute later, no response can bring a deleted object back."""
        self._deletion_seconds, self._clock = request_seconds + _LATE_SECONDS, clock
        self._objects: dict[Kind, dict[JobKey, dict[str, Raw]]] = {kind: {} for kind in (Kind.JOB, *CHILD_KINDS)}
        self._owners: dict[tuple[Kind, str, str], JobKey] = {}
        self._deleted: OrderedDict[str, float] = OrderedDict()
        self._complete_at: dict[str | None, int] = {}

    def find_job(self, key: JobKey) -> Raw | None:
        """The job as last seen."""
        return self._objects[Kind.JOB].get(key, {}).get(key.name)

    def all_jobs(self) -> list[Raw]:
        """All jobs."""
        return [job for jobs_by_name in self._objects[Kind.JOB].values() for job in jobs_by_name.values()]

    def all_keys(self) -> list[JobKey]:
        """Return every job, and every job name in the labels of some object."""
        return list(dict.fromkeys(key for objects_by_job in self._objects.values() for key in objects_by_job))

    def find_children(self, key: JobKey) -> Children:
        """Return all objects with the label of this job."""
        pods, services, claims, pod_groups = (tuple(self._objects[kind].get(key, {}).values()) for kind in CHILD_KINDS)
        return Children(pods, services, claims, pod_groups)

    def find_object(self, kind: Kind, namespace: str, name: str) -> Raw | None:
        """One object by its name."""
        key = self._owners.get((kind, namespace, name))
        return None if key is None else self._objects[kind][key][name]

    def record_object(self, kind: Kind, raw: Raw) -> JobKey | None:
        """Record an object; return its job, unless this version or a newer one was known.

        Our own writes come back as events with the whole object: these are recorded, and cause no reconcile.
        """
        key = owning_job(kind, raw)
        if key is None or raw["metadata"]["uid"] in self._deleted:
            return None
        objects = self._objects[kind].setdefault(key, {})
        cached = objects.get(raw["metadata"]["name"])
        if cached is not None and resource_version(cached) > resource_version(raw):
            return None
        if cached is None and kind is Kind.JOB and self._is_gone(key.namespace, resource_version(raw)):
            if not objects:
                del self._objects[kind][key]
            return None
        objects[raw["metadata"]["name"]] = slim_object(kind, raw)
        self._owners[kind, key.namespace, raw["metadata"]["name"]] = key
        return None if cached is not None and resource_version(cached) == resource_version(raw) else key

    def record_deletion(self, kind: Kind, raw: Raw) -> JobKey | None:
        """Record the end of an object; return its job."""
        key = owning_job(kind, raw)
        if key is None:
            return None
        uid, now = raw["metadata"]["uid"], self._clock()
        while self._deleted and next(iter(self._deleted.values())) <= now - self._deletion_seconds:
            self._deleted.popitem(last=False)
        self._deleted[uid] = now
        self._forget_object(kind, key, raw["metadata"]["name"], uid)
        return key

    def record_list(self, kind: Kind, key: JobKey, raws: Iterable[Raw], at_version: int) -> None:
        """Record all objects of a kind that a job had at a version; older ones that are not among them are gone."""
        raws = list(raws)
        listed_uids = {raw["metadata"]["uid"] for raw in raws}
        for name, cached in list(self._objects[kind].get(key, {}).items()):
            if cached["metadata"]["uid"] not in listed_uids and resource_version(cached) <= at_version:
                self._forget_object(kind, key, name, cached["metadata"]["uid"])
        for raw in raws:
            self.record_object(kind, raw)

    def mark_complete(self, namespace: str | None, at_version: int) -> None:
        """Note that all jobs, of a namespace or of all, were listed at a version: an older unknown job is gone.

        kopf reports events one at a time: an event from before the list may come after it.
        """
        self._complete_at[namespace] = at_version

    def _is_gone(self, namespace: str, at_version: int) -> bool:
        listed_version = max(self._complete_at.get(None, -1), self._complete_at.get(namespace, -1))
        return at_version <= listed_version

    def _forget_object(self, kind: Kind, key: JobKey, name: str, uid: str) -> None:
        objects = self._objects[kind].get(key, {})
        # One of the same name that came later is another object.
        if name in objects and objects[name]["metadata"]["uid"] == uid:
            del objects[name]
            self._owners.pop((kind, key.namespace, name), None)
        if not objects:
            self._objects[kind].pop(key, None)


def owning_job(kind: Kind, raw: Raw) -> JobKey | None:
    """Return the job that an object is or belongs to; None for an object without the label."""
    metadata = raw["metadata"]
    name = metadata["name"] if kind is Kind.JOB else (metadata.get("labels") or {}).get(Label.JOB)
    return None if name is None else JobKey(metadata["namespace"], name)


def resource_version(raw: Raw) -> int:
    """The resourceVersion as the number that, since Kubernetes 1.35, it promises to be."""
    return int(raw["metadata"]["resourceVersion"])


def slim_object(kind: Kind, raw: Raw) -> Raw:
    """The object without fields that nothing here reads."""
    metadata: dict[str, Any] = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    if _LAST_APPLIED in annotations:
        metadata["annotations"] = {name: text for name, text in annotations.items() if name != _LAST_APPLIED}
    slimmed = {**raw, "metadata": metadata}
    if kind is Kind.POD:
        spec: Mapping[str, Any] = raw.get("spec") or {}
        slimmed["spec"] = {name: spec[name] for name in _KEPT_OF_POD if name in spec}
    return slimmed
