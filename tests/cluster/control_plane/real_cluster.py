"""A cluster with the verbs of FakeCluster that is a real one: API server and controllers; nodes are played by hand.

The operator's side is its own ApiServer under its own service account. Kubelets are the tests': pods are bound, run and
end as a story says. Time is the real one plus what a story has let pass, and stands still while the operator looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, ItemsView, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from cluster.control_plane import jobs
from cluster.control_plane.api import RefusedError
from cluster.control_plane.plane import ControlPlane
from cluster.control_plane.pod_voices import PodVoices
from cluster.control_plane.volumes import VOLUMES, volume_for
from cluster.waiting import until
from fake_cluster import Body, FakeCluster, Id, OperatorCrash, format_time
from moejob_api.contract.pods import Label, PodProgress, PodRole
from moejob_api.profiles.fields import API_VERSION, ProfileKind
from moejob_api.profiles.reading import TrainingProfile
from moejob_client.api_client import ApiClient
from moejob_operator.actions import WRITE_ONLY, Event, Kind, Manifest, ObjectReference
from moejob_operator.cluster import Children, JobKey, Raw
from moejob_operator.kube_api.api_server import ApiServer
from moejob_operator.kube_api.cache import Cache
from moejob_operator.kube_api.informers import WATCHED
from moejob_operator.kube_api.live_lists import GangApis, LiveLists, collection_path
from moejob_operator.kube_api.pod_client import PodClient

KINDS = (Kind.JOB, *WATCHED)
# With what the operator may only create.
MADE = (*KINDS, *sorted(WRITE_ONLY))
HELD = "tests.moejob.dev/held"
QUOTA = "gpus"


@dataclass(eq=False)
class RealCluster(FakeCluster):
    """Implements moejob_operator.cluster.Cluster, and what a World does to a cluster."""

    plane: ControlPlane = field(kw_only=True)
    namespace: str = field(kw_only=True)
    api: ApiClient = field(kw_only=True)
    voices: PodVoices = field(kw_only=True)
    loop: asyncio.AbstractEventLoop = field(kw_only=True)
    passed: timedelta = field(default=timedelta(), init=False)
    lost: set[str] = field(default_factory=set)
    has_garbage: bool = False
    has_volumes: bool = True
    is_bound: bool = False

    def __post_init__(self) -> None:
        self._moment, self.passed = datetime.now(UTC), timedelta()
        self._forget()

    def _forget(self) -> None:
        """A new process of the operator knows nothing."""
        self.answers = self.voices.answers
        self._cache = Cache()
        self._lists = LiveLists(self.api, self._cache, self.namespace, GangApis(self.api))
        self._server = ApiServer(
            api=self.api,
            cache=self._cache,
            lists=self._lists,
            pods=PodClient(2.0, self.voices.port),
            identity="tests",
            remaining_seconds=lambda: float("inf"),
            on_status_written=lambda _before, _after: None,
            clock=lambda: self.now,
        )

    # --- time ---------------------------------------------------------------------------------------------------------

    @property  # type: ignore[misc]
    def now(self) -> datetime:
        """Return when something last happened, and what a story has let pass since, without reconciles."""
        return self._moment

    @now.setter
    def now(self, moment: datetime) -> None:
        if hasattr(self, "_moment"):
            self.passed += moment - self._moment
        self._moment = moment

    def catch_up(self) -> None:
        """Something happens: what the API server has dated until now is in the past."""
        self._moment = max(self._moment, datetime.now(UTC) + self.passed)

    # --- the operator's side ------------------------------------------------------------------------------------------

    def run_reconcile(self, reconciliation: Coroutine[Any, Any, float | None]) -> float | None:
        """One look of the operator, after its watches have caught up."""
        return self.loop.run_until_complete(self._run_reconcile(reconciliation))

    async def _run_reconcile(self, reconciliation: Coroutine[Any, Any, float | None]) -> float | None:
        # What asks pods belongs to the loop that it asks in.
        self._server = replace(self._server, pods=PodClient(2.0, self.voices.port))
        await asyncio.gather(*(self._lists.fill_cache(kind) for kind in KINDS))
        try:
            return await reconciliation
        except OperatorCrash:
            self._forget()
            raise

    async def get_job(self, key: JobKey) -> Raw | None:
        return await self._server.get_job(key)

    async def find_profile(self, namespace: str, name: str) -> TrainingProfile | None:
        return await self._server.find_profile(namespace, name)

    async def list_children(self, key: JobKey, *, live: bool) -> Children:
        return await self._server.list_children(key, live=live)

    async def ensure(self, manifest: Manifest) -> None:
        about = manifest["metadata"]
        self._begin_change(f"create {manifest['kind']} {about['name']}")
        await self._server.ensure(manifest)
        self._end_change()

    async def is_missing(self, manifest: Manifest) -> bool:
        return await self._server.is_missing(manifest)

    async def delete(self, ref: ObjectReference, *, grace_seconds: int | None) -> None:
        self._begin_change(f"{'force-' * (grace_seconds == 0)}delete {ref.kind} {ref.name}")
        self.has_garbage |= ref.kind is Kind.JOB
        await self._server.delete(ref, grace_seconds=grace_seconds)
        self._end_change()

    async def write_status(self, job: Raw, status: Raw) -> None:
        self._begin_change("write status")
        await self._server.write_status(job, status)
        self._end_change()

    async def post_event(self, job: Raw, event: Event) -> None:
        self._begin_change(None)
        await self._server.post_event(job, event)
        self._end_change()

    async def get_progress(self, pod: Raw) -> PodProgress | None:
        return await self._server.get_progress(pod)

    # --- the tests' side: reading -------------------------------------------------------------------------------------

    @property  # type: ignore[misc, override]
    def objects(self) -> Mapping[Id, Body]:
        """Everything that the operator knows of, as it is now."""
        return _Objects(self.plane, self.namespace)

    @objects.setter
    def objects(self, _: Mapping[Id, Body]) -> None:
        """There is nothing to begin with."""

    def pods(self, role: PodRole | None = None) -> Iterator[Body]:
        for body in sorted(self._listed(Kind.POD), key=lambda pod: str(pod["metadata"]["name"])):
            if role in (None, body["metadata"].get("labels", {}).get(Label.ROLE)):
                yield body

    def object_versions(self) -> Mapping[str, str]:
        return {body["metadata"]["uid"]: body["metadata"]["resourceVersion"] for _, body in self.objects.items()}

    def _listed(self, kind: Kind) -> list[Body]:
        return _listed(self.plane, kind, self.namespace)

    # --- the tests' side: changing ------------------------------------------------------------------------------------

    def store_changed(self, body: Body) -> None:
        """Make an object like this, as far as people, kubelets and controllers may."""
        self.catch_up()
        match body["kind"]:
            case Kind.JOB:
                self._change_job(body)
            case Kind.POD:
                self._change_pod(body)
            case _:
                raise NotImplementedError(f"a {body['kind']} is for its controller to change")

    def _change_job(self, body: Body) -> None:
        about = body["metadata"]
        path = jobs.path(self.namespace, about["name"])
        if "uid" not in about:
            self.plane.api.create(jobs.path(self.namespace), body | {"metadata": {"name": about["name"]}})
        elif "deletionTimestamp" in about:
            # In the foreground it would be gone in a moment: nothing here blocks it. So it is held by hand.
            self.plane.api.merge(path, {"metadata": {"finalizers": [HELD]}})
            self.plane.api.delete(path)
        else:
            self.plane.api.merge(path, {"spec": body["spec"]})

    def _change_pod(self, body: Body) -> None:
        path = _path((Kind.POD, self.namespace, body["metadata"]["name"]))
        node = body["spec"].get("nodeName")
        if node is not None and "nodeName" not in self.plane.api.get(path)["spec"]:
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            self.plane.api.create(f"{path}/binding", {"metadata": {"name": body["metadata"]["name"]}, "target": target})
        address = body["status"].get("podIP") or self.voices.new_address(body["metadata"]["uid"])
        self.plane.api.merge(f"{path}/status", {"status": body["status"] | {"podIP": address}})

    def delete_object(self, with_id: Id, *, force: bool = False) -> None:
        self.has_garbage |= with_id[0] is Kind.JOB
        path = _path(with_id)
        with suppress(RefusedError):
            self.plane.api.delete(f"{path}?gracePeriodSeconds=0" if force else path)
        if not force:
            self.catch_up()

    def remove_object(self, with_id: Id) -> None:
        self.delete_object(with_id, force=with_id[0] is Kind.POD)

    def lose_node(self, node: str) -> None:
        """The node is taken out of the cluster, and the grace of its pods passes: before that no test asks for it."""
        self.plane.api.delete(f"/api/v1/nodes/{node}")
        self.lost.add(node)
        self.now += timedelta(seconds=301)

    def give_profile(self, kind: ProfileKind, name: str, spec: Mapping[str, Any]) -> None:
        self.catch_up()
        body = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}
        path = self._profiles_path(kind)
        if (kind, name) in self.profiles:
            # A merge would keep fields that the new spec lacks.
            self.plane.api.replace(f"{path}/{name}", self.plane.api.get(f"{path}/{name}") | {"spec": dict(spec)})
        else:
            self.plane.api.create(path, body)
        self.profiles[kind, name] = body

    def delete_profile(self, kind: ProfileKind, name: str) -> None:
        del self.profiles[kind, name]
        self.plane.api.delete(f"{self._profiles_path(kind)}/{name}")

    def _profiles_path(self, kind: ProfileKind) -> str:
        namespaced = "" if kind is ProfileKind.CLUSTER else f"namespaces/{self.namespace}/"
        return f"/apis/{API_VERSION}/{namespaced}{kind.plural}"

    def deny_pods(self, message: str | None) -> None:
        """A real quota; the words are those of the API server."""
        path = f"/api/v1/namespaces/{self.namespace}/resourcequotas"
        if message is None:
            self.plane.api.delete(f"{path}/{QUOTA}")
        else:
            self.plane.api.create(path, {"metadata": {"name": QUOTA}, "spec": {"hard": {"pods": "0"}}})
        until(lambda: self._denial() == (message is not None), waiting_for="the quota to count")

    def _denial(self) -> bool:
        pod = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "main", "image": "none"}]}}
        try:
            self.plane.api.create(f"/api/v1/namespaces/{self.namespace}/pods?dryRun=All", pod)
        except RefusedError as refused:
            # Until it has been counted once the words are others.
            return "exceeded quota" in refused.message
        return False

    # --- controllers --------------------------------------------------------------------------------------------------

    def controllers_act(self) -> None:
        """Wait for the garbage collector, when a job was deleted, and for the volume controller."""
        if self.has_garbage:
            self._wait_for(self._garbage, "the garbage collector")
            self.has_garbage = self.is_bound = False
        elif self.is_bound or not self.has_volumes:
            return
        for claim in self._listed(Kind.CLAIM):
            # One that is going has no successor yet: the next look finds that.
            if "deletionTimestamp" not in claim["metadata"]:
                self._bind(claim)
                self.is_bound = True

    def _garbage(self) -> list[str]:
        bodies = dict(self.objects.items())
        owners = {body["metadata"]["uid"] for (kind, _, _), body in bodies.items() if kind is Kind.JOB}
        return [
            name
            for (_, _, name), body in bodies.items()
            if "deletionTimestamp" not in body["metadata"]
            and any(owner["uid"] not in owners for owner in body["metadata"].get("ownerReferences", ()))
        ]

    def _bind(self, claim: Body) -> None:
        about = claim["metadata"]
        if claim["status"]["phase"] == "Bound":
            return
        with suppress(RefusedError):
            self.plane.api.create(VOLUMES, volume_for(claim))
        self._wait_for(partial(self._is_loose, about["name"]), "the volume controller")

    def _is_loose(self, claim: str) -> bool:
        found = self.objects.get((Kind.CLAIM, self.namespace, claim))
        return found is not None and found["status"]["phase"] != "Bound"

    def _wait_for(self, work: Callable[[], object], whom: str) -> None:
        until(lambda: not work(), waiting_for=f"{whom} in {self.namespace}")


class _Objects(Mapping[Id, Body]):
    """Everything that the operator knows of or has made, as it is at any moment."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane = plane
        self._namespace = namespace

    def __getitem__(self, with_id: Id) -> Body:
        try:
            found: Body = self._plane.api.get(_path(with_id))
        except RefusedError as refused:
            raise KeyError(with_id) from refused
        return found

    def __iter__(self) -> Iterator[Id]:
        return iter(dict(self.items()))

    def __len__(self) -> int:
        return len(dict(self.items()))

    def items(self) -> ItemsView[Id, Body]:
        """All of them, one list a kind."""
        return {
            (kind, self._namespace, body["metadata"]["name"]): body
            for kind in MADE
            for body in _listed(self._plane, kind, self._namespace)
            if kind is Kind.JOB or Label.JOB in (body["metadata"].get("labels") or {})
        }.items()


def _listed(plane: ControlPlane, kind: Kind, namespace: str) -> list[Body]:
    listed = plane.api.get(collection_path(kind, namespace))
    return [{"apiVersion": listed["apiVersion"], "kind": kind.value} | item for item in listed["items"]]


def _path(with_id: Id) -> str:
    kind, namespace, name = with_id
    return f"{collection_path(kind, namespace)}/{name}"


def add_node(plane: ControlPlane, name: str) -> None:
    """A node that is ready, that no scheduler uses and that only the tests play."""
    plane.api.create("/api/v1/nodes", {"metadata": {"name": name}, "spec": {"unschedulable": True}, "status": _ready()})


def send_heartbeat(plane: ControlPlane, name: str) -> None:
    """The node lives: after 50 s of silence the controller manager would take it for lost."""
    plane.api.merge(f"/api/v1/nodes/{name}/status", {"status": _ready()})


def _ready() -> Body:
    now = format_time(datetime.now(UTC))
    condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "played by hand"}
    return {"conditions": [condition | {"lastHeartbeatTime": now, "lastTransitionTime": now}]}
