"""Objects as the API server has them now: to begin a watch, and for acts that cannot be taken back.

Every list ends in the cache as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moejob_api.contract import MANAGED_BY, Label
from moejob_api.job import GROUP, PLURAL, VERSION
from moejob_operator.actions import Kind
from moejob_operator.api_client import Absent, ApiClient
from moejob_operator.cache import Cache, owner, slim
from moejob_operator.children.gangs import GangApi
from moejob_operator.cluster import JobKey, Raw

JOBS = f"{GROUP}/{VERSION}"
OURS = f"{Label.MANAGED_BY}={MANAGED_BY}"
_WITH_OBJECTS = (GangApi.NATIVE, GangApi.VOLCANO, GangApi.COSCHEDULING)
_RESOURCES = {
    Kind.POD: ("v1", "pods"),
    Kind.SERVICE: ("v1", "services"),
    Kind.CLAIM: ("v1", "persistentvolumeclaims"),
    Kind.JOB: (JOBS, PLURAL),
}


def collection(kind: Kind, namespace: str | None, api_version: str = "") -> str:
    """The path of all objects of a kind; pod groups need to be told whose they are."""
    api, plural = _RESOURCES.get(kind) or (api_version, "podgroups")
    root = "/api/v1" if api == "v1" else f"/apis/{api}"
    return f"{root}/{plural}" if namespace is None else f"{root}/namespaces/{namespace}/{plural}"


@dataclass(slots=True)
class GangApis:
    """Which gang schedulers the cluster has. Read again now and then: one may be installed while we run."""

    api: ApiClient
    served: frozenset[GangApi] = frozenset()

    async def refresh(self) -> None:
        """Ask the API server what it serves."""
        groups = (await self.api.get("/apis"))["groups"]
        versions = {version["groupVersion"] for group in groups for version in group["versions"]}
        self.served = frozenset(
            {gang for gang in _WITH_OBJECTS if gang in versions and await self._has_pod_groups(gang)}
            | ({GangApi.KUEUE} if any(group["name"] == GangApi.KUEUE for group in groups) else set())
        )

    @property
    def with_objects(self) -> tuple[GangApi, ...]:
        """Those of which pod groups can be listed."""
        return tuple(gang for gang in _WITH_OBJECTS if gang in self.served)

    async def _has_pod_groups(self, gang: GangApi) -> bool:
        try:
            found = await self.api.get(f"/apis/{gang}")
        except Absent:
            return False
        return any(resource["name"] == "podgroups" for resource in found.get("resources") or ())


@dataclass(frozen=True, slots=True)
class Lists:
    """Lists jobs and what belongs to them, in one namespace or in all."""

    api: ApiClient
    cache: Cache
    namespace: str | None
    gangs: GangApis

    async def of_job(self, kind: Kind, key: JobKey) -> tuple[Raw, ...]:
        """All objects of a kind that say they belong to a job of this name, as they are now."""
        query = {"labelSelector": f"{OURS},{Label.JOB}={key.name}"}
        found: list[Raw] = []
        versions = []
        for path in self.paths(kind, key.namespace):
            async for page in self.api.pages(path, query):
                found += (slim(kind, raw) for raw in page.items)
                versions.append(int(page.version))
        if versions:
            self.cache.listed(kind, key, found, min(versions))
        return tuple(found)

    async def fill(self, kind: Kind) -> int:
        """Make the cache hold exactly what there is of a kind now. Returns the version that this is true of."""
        found: dict[JobKey, list[Raw]] = {}
        versions = []
        for path in self.paths(kind, self.namespace):
            async for page in self.api.pages(path, selected(kind)):
                versions.append(int(page.version))
                for raw in page.items:
                    key = owner(kind, raw)
                    if key is not None:
                        found.setdefault(key, []).append(slim(kind, raw))
        version = min(versions, default=0)
        # What is in a namespace of other lists, these have not seen.
        known = {key for key in self.cache.all_keys() if self.namespace in (None, key.namespace)}
        for key in known | set(found):
            self.cache.listed(kind, key, found.get(key, ()), version)
        return version

    def paths(self, kind: Kind, namespace: str | None) -> tuple[str, ...]:
        """Where objects of a kind are; pod groups in as many places as there are gang schedulers."""
        apis = self.gangs.with_objects if kind is Kind.POD_GROUP else ("",)
        return tuple(collection(kind, namespace, api) for api in apis)


def selected(kind: Kind) -> Mapping[str, str]:
    """What a list or a watch asks for: of what everybody has only ours."""
    return {} if kind is Kind.JOB else {"labelSelector": OURS}
