"""Objects as the API server has them now: to begin a watch, and before actions that cannot be undone.

Every list also updates the cache.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

from moejob_api.contract.pods import MANAGED_BY, Label
from moejob_api.job import GROUP, PLURAL, VERSION
from moejob_client.api_client import ApiClient, Listing
from moejob_client.errors import NotFound
from moejob_operator.actions import Kind
from moejob_operator.children.gangs import GangApi
from moejob_operator.cluster import JobKey, Raw
from moejob_operator.kube_api.cache import Cache, owning_job, slim_object

JOBS = f"{GROUP}/{VERSION}"
OURS = f"{Label.MANAGED_BY}={MANAGED_BY}"
_WITH_OBJECTS = (GangApi.NATIVE, GangApi.VOLCANO, GangApi.COSCHEDULING)
_RESOURCES = {
    Kind.POD: ("v1", "pods"),
    Kind.SERVICE: ("v1", "services"),
    Kind.CLAIM: ("v1", "persistentvolumeclaims"),
    Kind.JOB: (JOBS, PLURAL),
    Kind.SECRET: ("v1", "secrets"),
    Kind.NETWORK_POLICY: ("networking.k8s.io/v1", "networkpolicies"),
}


def collection_path(kind: Kind, namespace: str | None, api_version: str = "") -> str:
    """The path of all objects of a kind; pod groups need the API of their scheduler."""
    api, plural = _RESOURCES.get(kind) or (api_version, "podgroups")
    root = "/api/v1" if api == "v1" else f"/apis/{api}"
    return f"{root}/{plural}" if namespace is None else f"{root}/namespaces/{namespace}/{plural}"


@dataclass(slots=True)
class GangApis:
    """The gang schedulers of the cluster. Read again now and then: one may be installed while we run."""

    api: ApiClient
    served_apis: frozenset[GangApi] = frozenset()

    async def refresh(self) -> None:
        """Ask the API server what it serves."""
        groups = (await self.api.get("/apis"))["groups"]
        versions = {version["groupVersion"] for group in groups for version in group["versions"]}
        self.served_apis = frozenset(
            {gang for gang in _WITH_OBJECTS if gang in versions and await self._has_pod_groups(gang)}
            | ({GangApi.KUEUE} if any(group["name"] == GangApi.KUEUE for group in groups) else set())
        )

    @property
    def apis_with_objects(self) -> tuple[GangApi, ...]:
        """Return the served APIs that have pod groups to list."""
        return tuple(gang for gang in _WITH_OBJECTS if gang in self.served_apis)

    async def _has_pod_groups(self, gang: GangApi) -> bool:
        try:
            api_body = await self.api.get(f"/apis/{gang}")
        except NotFound:
            return False
        return any(resource["name"] == "podgroups" for resource in api_body.get("resources") or ())


@dataclass(frozen=True, slots=True)
class LiveLists:
    """Lists jobs and what belongs to them, in one namespace or in all."""

    api: ApiClient
    cache: Cache
    namespace: str | None
    gangs: GangApis

    async def list_of_job(self, kind: Kind, key: JobKey) -> tuple[Raw, ...]:
        """List all objects of a kind with the label of this job."""
        query = {"labelSelector": f"{OURS},{Label.JOB}={key.name}"}
        objects: list[Raw] = []
        versions = []
        for path in self.api_paths(kind, key.namespace):
            async for page in self._list_pages(kind, path, query):
                objects += (slim_object(kind, raw) for raw in page.items)
                versions.append(int(page.version))
        if versions:
            self.cache.record_list(kind, key, objects, min(versions))
        return tuple(objects)

    async def fill_cache(self, kind: Kind) -> int:
        """List a kind into the cache, which then holds exactly these objects; return the version of the list."""
        objects, versions = list[Raw](), list[int]()
        for path in self.api_paths(kind, self.namespace):
            async for page in self._list_pages(kind, path, label_query(kind)):
                objects += (slim_object(kind, raw) for raw in page.items)
                versions.append(int(page.version))
        version = min(versions, default=0)
        self.replace_cached(kind, objects, version)
        return version

    async def _list_pages(self, kind: Kind, path: str, query: Mapping[str, str]) -> AsyncIterator[Listing]:
        try:
            async for page in self.api.list_pages(path, query):
                yield page
        except NotFound:
            # A gang scheduler may be uninstalled between the look at what is served and this list.
            if kind is not Kind.POD_GROUP:
                raise

    def replace_cached(self, kind: Kind, raws: Iterable[Raw], version: int) -> None:
        """Make the cache hold exactly these objects, which were all of a kind at a version."""
        objects_by_job: dict[JobKey, list[Raw]] = {}
        for raw in raws:
            key = owning_job(kind, raw)
            if key is not None:
                objects_by_job.setdefault(key, []).append(raw)
        # Objects in other namespaces belong to other lists.
        cached_keys = {key for key in self.cache.all_keys() if self.namespace in (None, key.namespace)}
        for key in cached_keys | set(objects_by_job):
            self.cache.record_list(kind, key, objects_by_job.get(key, ()), version)
        if kind is Kind.JOB:
            self.cache.mark_complete(self.namespace, version)

    def watch_name(self, kind: Kind) -> str:
        """Name of the watch of a kind, for people."""
        return f"watch of {kind}" if self.namespace is None else f"watch of {kind} in {self.namespace}"

    def api_paths(self, kind: Kind, namespace: str | None) -> tuple[str, ...]:
        """Return the API paths of objects of a kind; pod groups have as many as there are gang schedulers."""
        apis = self.gangs.apis_with_objects if kind is Kind.POD_GROUP else ("",)
        return tuple(collection_path(kind, namespace, api) for api in apis)


def label_query(kind: Kind) -> Mapping[str, str]:
    """Return the query of a list or a watch: all jobs, and of other kinds only the operator's own objects."""
    return {} if kind is Kind.JOB else {"labelSelector": OURS}
