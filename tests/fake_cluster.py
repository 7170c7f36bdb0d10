"""A cluster without I/O: what an API server does to objects, a watch cache that may lag, faults on demand.

It knows UIDs, resource versions, graceful deletion, 409, 422 and quota, and it watches over the operator: a pod of
one gang that is created while a pod of another is still there is an error at once.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from moejob_api.contract.pods import Label, PodProgress, PodRole
from moejob_api.job.status import Status
from moejob_api.profiles.fields import ProfileKind
from moejob_api.profiles.reading import TrainingProfile, read_profile_body
from moejob_operator.actions import Event, Kind, Manifest, ObjectReference
from moejob_operator.cluster import Children, Conflict, Forbidden, JobKey, NameInTheWay, Raw, Retryable
from moejob_operator.observed import is_as_made

Body = dict[str, Any]
Id = tuple[Kind, str, str]
NAMESPACE = "team"
START = datetime(2030, 1, 1, tzinfo=UTC)


class OperatorCrash(BaseException):
    """The operator's process is gone. Not an Exception: nothing may catch it."""


class TwoGangs(AssertionError):
    """Pods of two attempts would have run at the same time."""


@dataclass(eq=False)
class FakeCluster:
    """Implements moejob_operator.cluster.Cluster. Objects are changed by the operator and by tests, through verbs."""

    now: datetime = START
    objects: dict[Id, Body] = field(default_factory=dict)
    # What the watches have received; the same as `objects` unless `lags`.
    cache: dict[Id, Body] = field(default_factory=dict)
    lags: bool = False
    events: list[Event] = field(default_factory=list)
    # One line for every change that the operator made.
    log: list[str] = field(default_factory=list)
    answers: dict[str, PodProgress] = field(default_factory=dict)
    lost_nodes: frozenset[str] = frozenset()
    refuses: Callable[[Manifest], str | None] = lambda _: None
    # The operator dies before this change (even) or after it (odd), counted from 0 in halves.
    crash_at: int | None = None
    # Raised instead of the next calls.
    faults: list[Exception] = field(default_factory=list)
    # What pods were given to end, by their names.
    graces: dict[str, int | None] = field(default_factory=dict)
    profiles: dict[tuple[ProfileKind, str], Body] = field(default_factory=dict)
    # UIDs of what the operator created.
    made: set[str] = field(default_factory=set)
    lists: int = 0
    questions: int = 0
    halves: int = 0
    versions: int = 0

    # --- the operator's side ---------------------------------------------------------------------------------------

    async def get_job(self, key: JobKey) -> Raw | None:
        self._raise_fault()
        body = self._view.get((Kind.JOB, key.namespace, key.name))
        return copy.deepcopy(body)

    async def find_profile(self, namespace: str, name: str) -> TrainingProfile | None:
        self._raise_fault()
        assert namespace == NAMESPACE
        bodies = ((kind, self.profiles.get((kind, name))) for kind in ProfileKind)
        return next((read_profile_body(body, kind) for kind, body in bodies if body is not None), None)

    async def list_children(self, key: JobKey, *, live: bool) -> Children:
        self._raise_fault()
        self.lists += live
        if live:
            # As the real one: what was listed is known to the cache too.
            self.sync(jobs=False)
        view = self.objects if live else self._view

        def list_kind(kind: Kind) -> tuple[Body, ...]:
            return tuple(copy.deepcopy(body) for body in _find_children(view, kind, key))

        return Children(
            pods=list_kind(Kind.POD),
            services=list_kind(Kind.SERVICE),
            claims=list_kind(Kind.CLAIM),
            pod_groups=list_kind(Kind.POD_GROUP),
            lost_nodes=self.lost_nodes,
        )

    async def ensure(self, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        kind = Kind(manifest["kind"])
        with_id = (kind, metadata["namespace"], metadata["name"])
        self._begin_change(f"create {kind} {metadata['name']}")
        refusal = self.refuses(manifest)
        if refusal is not None:
            raise Forbidden(refusal)
        stored = self.objects.get(with_id)
        if stored is None:
            self._expect_one_gang(manifest)
            self._store_object(with_id, _fill_in_body(manifest, self.now))
            self.made.add(self.objects[with_id]["metadata"]["uid"])
            self._cache_write(with_id)
        elif not is_as_made(stored, manifest):
            raise NameInTheWay(manifest)
        self._end_change()

    async def is_missing(self, manifest: Manifest) -> bool:
        metadata = manifest["metadata"]
        return (Kind(manifest["kind"]), metadata["namespace"], metadata["name"]) not in self.objects

    async def delete(self, ref: ObjectReference, *, grace_seconds: int | None) -> None:
        self._begin_change(f"{'force-' * (grace_seconds == 0)}delete {ref.kind} {ref.name}")
        self.graces[ref.name] = grace_seconds
        with_id = (ref.kind, ref.namespace, ref.name)
        stored = self.objects.get(with_id)
        if stored is not None and stored["metadata"]["uid"] == ref.uid:
            self.delete_object(with_id, force=grace_seconds == 0)
            self._cache_write(with_id)
        self._end_change()

    async def write_status(self, job: Raw, status: Raw) -> None:
        self._begin_change("write status")
        with_id = (Kind.JOB, job["metadata"]["namespace"], job["metadata"]["name"])
        stored = self.objects.get(with_id)
        if stored is None or stored["metadata"]["resourceVersion"] != job["metadata"]["resourceVersion"]:
            raise Conflict("the job has changed")
        # The API server refuses what the CRD does not know.
        Status.model_validate_json(Status.model_validate(status, strict=False).model_dump_json(by_alias=True))
        self._store_object(with_id, stored | {"status": copy.deepcopy(dict(status))})
        self._cache_write(with_id)
        self._end_change()

    async def post_event(self, job: Raw, event: Event) -> None:
        assert job["metadata"]["uid"]
        self._begin_change(None)
        self.events.append(event)
        self._end_change()

    async def get_progress(self, pod: Raw) -> PodProgress | None:
        self.questions += 1
        return self.answers.get(pod["metadata"]["uid"])

    # --- the tests' side --------------------------------------------------------------------------------------------

    def run_reconcile(self, reconciliation: Coroutine[Any, Any, float | None]) -> float | None:
        """One reconcile of the operator, to its end."""
        return asyncio.run(reconciliation)

    def object_versions(self) -> Mapping[str, str]:
        """The version of every object, by UID."""
        return {body["metadata"]["uid"]: body["metadata"]["resourceVersion"] for body in self.objects.values()}

    def controllers_act(self) -> None:
        """Garbage is collected and claims are bound at once: nothing is left to do."""

    def give_profile(self, kind: ProfileKind, name: str, spec: Mapping[str, Any]) -> None:
        """kubectl apply of a profile."""
        before = self.profiles.get((kind, name))
        self.versions += 1
        metadata = {"name": name, "uid": f"uid-{self.versions}", "generation": 1}
        if before is not None:
            metadata = before["metadata"] | {"generation": before["metadata"]["generation"] + 1}
        self.profiles[kind, name] = {"metadata": metadata, "spec": copy.deepcopy(dict(spec))}

    def delete_profile(self, kind: ProfileKind, name: str) -> None:
        """kubectl delete of a profile."""
        del self.profiles[kind, name]

    def deny_pods(self, message: str | None) -> None:
        """A quota denies pods, in these words; None: no longer."""
        self.refuses = lambda manifest: message if manifest["kind"] == Kind.POD else None

    def lose_node(self, node: str) -> None:
        """A node is known to be lost."""
        self.lost_nodes |= {node}

    def sync(self, *, jobs: bool = True) -> None:
        """The watches catch up."""
        unchanged = {} if jobs else {key: body for key, body in self.cache.items() if key[0] is Kind.JOB}
        reported = {key: body for key, body in self.objects.items() if jobs or key[0] is not Kind.JOB}
        self.cache = unchanged | copy.deepcopy(reported)

    def pods(self, role: PodRole | None = None) -> Iterator[Body]:
        """Pods that there are, by name."""
        for (kind, _, _), body in sorted(self.objects.items()):
            if kind is Kind.POD and role in (None, body["metadata"]["labels"].get(Label.ROLE)):
                yield body

    def store_changed(self, body: Body) -> None:
        """Store a changed object."""
        self._store_object((Kind(body["kind"]), body["metadata"]["namespace"], body["metadata"]["name"]), body)

    def delete_object(self, with_id: Id, *, force: bool = False) -> None:
        """Delete as the API server does: a pod gets its grace period, everything else is gone."""
        body = self.objects[with_id]
        is_assigned = "nodeName" in body.get("spec", {})
        if with_id[0] is not Kind.POD or force or not is_assigned:
            self.remove_object(with_id)
        elif "deletionTimestamp" not in body["metadata"]:
            grace = timedelta(seconds=body["spec"]["terminationGracePeriodSeconds"])
            self._store_object(
                with_id, body | {"metadata": body["metadata"] | {"deletionTimestamp": format_time(self.now + grace)}}
            )

    def remove_object(self, with_id: Id) -> None:
        """An object is no more; what a job owned goes with it."""
        body = self.objects.pop(with_id)
        if with_id[0] is not Kind.JOB:
            return
        uid = body["metadata"]["uid"]
        for key in [key for key, owned in self.objects.items() if uid in _owner_uids(owned)]:
            self.delete_object(key)

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _view(self) -> Mapping[Id, Body]:
        return self.cache if self.lags else self.objects

    def _store_object(self, with_id: Id, body: Body) -> None:
        self.versions += 1
        metadata = body["metadata"] | {"resourceVersion": str(self.versions)}
        metadata.setdefault("uid", f"uid-{self.versions}")
        self.objects[with_id] = body | {"metadata": metadata}

    def _cache_write(self, with_id: Id) -> None:
        """The answer to a write is known to the cache before any watch tells of it; a deletion for good is not."""
        if with_id in self.objects:
            self.cache[with_id] = copy.deepcopy(self.objects[with_id])

    def _begin_change(self, change: str | None) -> None:
        self._raise_fault()
        self._crash_when_due()
        if change is not None:
            self.log.append(change)

    def _end_change(self) -> None:
        self._crash_when_due()

    def _crash_when_due(self) -> None:
        self.halves += 1
        if self.crash_at is not None and self.halves > self.crash_at:
            self.crash_at = None
            raise OperatorCrash

    def _raise_fault(self) -> None:
        if self.faults:
            raise self.faults.pop()

    def _expect_one_gang(self, manifest: Manifest) -> None:
        labels = manifest["metadata"].get("labels", {})
        if labels.get(Label.ROLE) != PodRole.TRAINER:
            return
        others = [
            pod["metadata"]["name"]
            for pod in self.pods(PodRole.TRAINER)
            if pod["metadata"]["uid"] in self.made
            and pod["metadata"]["labels"][Label.JOB] == labels[Label.JOB]
            and pod["metadata"]["labels"][Label.ATTEMPT] != labels[Label.ATTEMPT]
        ]
        if others:
            raise TwoGangs(f"{manifest['metadata']['name']} would run beside {', '.join(others)}")


def format_time(time: datetime) -> str:
    """A time as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def unavailable_error() -> Exception:
    """Return what a call raises when the API server does not answer."""
    return Retryable("the API server does not answer")


def _fill_in_body(manifest: Manifest, now: datetime) -> Body:
    body = copy.deepcopy(dict(manifest))
    body["metadata"]["creationTimestamp"] = format_time(now)
    if body["kind"] == Kind.POD:
        body["status"] = {"phase": "Pending"}
    if body["kind"] == Kind.CLAIM:
        body["status"] = {"phase": "Bound"}
    return body


def _find_children(view: Mapping[Id, Body], kind: Kind, key: JobKey) -> Iterator[Body]:
    for (object_kind, namespace, _), body in sorted(view.items()):
        labels = body["metadata"].get("labels") or {}
        if object_kind is kind and namespace == key.namespace and labels.get(Label.JOB) == key.name:
            yield body


def _owner_uids(body: Mapping[str, Any]) -> set[str]:
    return {owner["uid"] for owner in body["metadata"].get("ownerReferences", ())}
