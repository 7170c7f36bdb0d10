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
        self._late, self._clock = request_seconds + _LATE_SECONDS, clock
        self._objects: dict[Kind, dict[JobKey, dict[str, Raw]]] = {kind: {} for kind in (Kind.JOB, *CHILD_KINDS)}
        self._owners: dict[tuple[Kind, str, str], JobKey] = {}
        self._deleted: OrderedDict[str, float] = OrderedDict()
        self._complete_at: dict[str | None, int] = {}

    def job(self, key: JobKey) -> Raw | None:
        """The job as last seen."""
        return self._objects[Kind.JOB].get(key, {}).get(key.name)

    def jobs(self) -> list[Raw]:
        """All jobs."""
        return [job for held in self._objects[Kind.JOB].values() for job in held.values()]

    def all_keys(self) -> list[JobKey]:
        """Return every job, and every job name in the labels of some object."""
        return list(dict.fromkeys(key for held in self._objects.values() for key in held))

    def children(self, key: JobKey) -> Children:
        """Return all objects with the label of this job."""
        pods, services, claims, pod_groups = (tuple(self._objects[kind].get(key, {}).values()) for kind in CHILD_KINDS)
        return Children(pods, services, claims, pod_groups)

    def find(self, kind: Kind, namespace: str, name: str) -> Raw | None:
        """One object by its name."""
        key = self._owners.get((kind, namespace, name))
        return None if key is None else self._objects[kind][key][name]

    def seen(self, kind: Kind, raw: Raw) -> JobKey | None:
        """Record an object; return its job, unless this version or a newer one was known.

        Our own writes come back as events with the whole object: these are recorded, and cause no reconcile.
        """
        key = owner(kind, raw)
        if key is None or raw["metadata"]["uid"] in self._deleted:
            return None
        held = self._objects[kind].setdefault(key, {})
        known = held.get(raw["metadata"]["name"])
        if known is not None and version(known) > version(raw):
            return None
        if known is None and kind is Kind.JOB and self._is_gone(key.namespace, version(raw)):
            if not held:
                del self._objects[kind][key]
            return None
        held[raw["metadata"]["name"]] = slim(kind, raw)
        self._owners[kind, key.namespace, raw["metadata"]["name"]] = key
        return None if known is not None and version(known) == version(raw) else key

    def gone(self, kind: Kind, raw: Raw) -> JobKey | None:
        """Record the end of an object; return its job."""
        key = owner(kind, raw)
        if key is None:
            return None
        uid, now = raw["metadata"]["uid"], self._clock()
        while self._deleted and next(iter(self._deleted.values())) <= now - self._late:
            self._deleted.popitem(last=False)
        self._deleted[uid] = now
        self._forget(kind, key, raw["metadata"]["name"], uid)
        return key

    def listed(self, kind: Kind, key: JobKey, raws: Iterable[Raw], at_version: int) -> None:
        """Record all objects of a kind that a job had at a version; older ones that are not among them are gone."""
        raws = list(raws)
        there = {raw["metadata"]["uid"] for raw in raws}
        for name, known in list(self._objects[kind].get(key, {}).items()):
            if known["metadata"]["uid"] not in there and version(known) <= at_version:
                self._forget(kind, key, name, known["metadata"]["uid"])
        for raw in raws:
            self.seen(kind, raw)

    def complete(self, namespace: str | None, at_version: int) -> None:
        """Note that all jobs, of a namespace or of all, were listed at a version: an older unknown job is gone.

        kopf reports events one at a time: an event from before the list may come after it.
        """
        self._complete_at[namespace] = at_version

    def _is_gone(self, namespace: str, at_version: int) -> bool:
        listed = max(self._complete_at.get(None, -1), self._complete_at.get(namespace, -1))
        return at_version <= listed

    def _forget(self, kind: Kind, key: JobKey, name: str, uid: str) -> None:
        held = self._objects[kind].get(key, {})
        # One of the same name that came later is another object.
        if name in held and held[name]["metadata"]["uid"] == uid:
            del held[name]
            self._owners.pop((kind, key.namespace, name), None)
        if not held:
            self._objects[kind].pop(key, None)


def owner(kind: Kind, raw: Raw) -> JobKey | None:
    """Return the job that an object is or belongs to; None for an object without the label."""
    metadata = raw["metadata"]
    name = metadata["name"] if kind is Kind.JOB else (metadata.get("labels") or {}).get(Label.JOB)
    return None if name is None else JobKey(metadata["namespace"], name)


def version(raw: Raw) -> int:
    """The resourceVersion as the number that, since Kubernetes 1.35, it promises to be."""
    return int(raw["metadata"]["resourceVersion"])


def slim(kind: Kind, raw: Raw) -> Raw:
    """The object without fields that nothing here reads."""
    metadata: dict[str, Any] = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    if _LAST_APPLIED in annotations:
        metadata["annotations"] = {name: text for name, text in annotations.items() if name != _LAST_APPLIED}
    kept = {**raw, "metadata": metadata}
    if kind is Kind.POD:
        spec: Mapping[str, Any] = raw.get("spec") or {}
        kept["spec"] = {name: spec[name] for name in _KEPT_OF_POD if name in spec}
    return kept
