"""Jobs of a namespace, asked of and steered through the API server. Needs rights in that namespace alone.

A watch is one connection for all jobs of a namespace, continued from the version that it last saw.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

from moejob_api import api_bodies
from moejob_api.api_bodies import Raw
from moejob_api.job import GROUP, KIND, PLURAL, VERSION
from moejob_api.job.phase import Phase
from moejob_client.api_client import ApiClient, Expired, NotFound
from moejob_client.errors import Forbidden, Retryable
from moejob_client.failures import JobRequestError, RequestFailure, explained_failures

if TYPE_CHECKING:
    from moejob_api.job import MoETrainingJob
    from moejob_api.job.status import Status

# `@latest` names the job of the namespace that was created last: no name of an object begins with an @.
LATEST = "@latest"
_PAUSE_SECONDS = 1.0
# What holds up a job lies in these, for the diagnosis.
_EVIDENCE = {"Pod": "pods", "PersistentVolumeClaim": "persistentvolumeclaims", "Event": "events"}


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as the API server has it."""

    body: Raw

    @property
    def status(self) -> Status:
        """Return its status; fields that this version cannot read count as absent."""
        from moejob_api.diagnosis.reading import read_status  # noqa: PLC0415 no verb waits for models it does not need

        return read_status(self.body.get("status"))

    @property
    def name(self) -> str:
        """Return its name."""
        return api_bodies.as_text(api_bodies.object_metadata(self.body).get("name"))

    @property
    def namespace(self) -> str:
        """Return its namespace."""
        return api_bodies.as_text(api_bodies.object_metadata(self.body).get("namespace"))

    @property
    def uid(self) -> str:
        """Return its UID: a job that is created again under the same name has another."""
        return api_bodies.as_text(api_bodies.object_metadata(self.body).get("uid"))

    @property
    def created_at(self) -> datetime | None:
        """Return when it was created."""
        return api_bodies.as_time(api_bodies.object_metadata(self.body).get("creationTimestamp"))

    @property
    def phase(self) -> Phase | None:
        """Return its phase; None before the operator has seen it."""
        text = self.status_text("phase")
        return Phase(text) if text in set(Phase) else None

    def status_text(self, *path: str) -> str:
        """Return a text of the status; an empty one when it is absent."""
        value: object = self.body.get("status")
        for key in path:
            value = api_bodies.as_mapping(value).get(key)
        return api_bodies.as_text(value)

    @property
    def is_finished(self) -> bool:
        """Return whether nothing more will happen to it."""
        return self.phase is not None and self.phase.is_finished


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A job as a watch reports it; `is_gone`: it was deleted."""

    job: JobView
    is_gone: bool = False


class AsyncClient:
    """Jobs of one namespace. Every failure is a JobRequestError: one sentence with its fix."""

    def __init__(self, http: ApiClient, namespace: str) -> None:
        self._http = http
        self.namespace = namespace

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.close()

    async def submit(self, job: MoETrainingJob, *, dry_run: bool = False) -> str:
        """Create a job and return its UID. A dry run asks the API server for its verdict, and creates nothing."""
        version = job.api_version.rpartition("/")[2]
        body = job.model_dump(
            mode="json",
            by_alias=True,
            exclude_defaults=True,
            exclude={"status": True, "metadata": {"uid": True, "generation": True, "namespace": True}},
        )
        # Strict: an older definition would drop a field that it does not know, and train something else.
        query = "?fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
        with explained_failures(f"cannot submit {job.metadata.name}"):
            created = await self._http.create(self._jobs_path(version=version) + query, body)
        return api_bodies.as_text(api_bodies.object_metadata(created).get("uid"))

    async def get(self, name: str) -> JobView:
        """Return a job by its name, or the newest by `@latest`."""
        if name == LATEST:
            return await self._get_latest()
        with explained_failures(f"cannot get {name}"):
            return JobView(await self._http.get(self._jobs_path(name)))

    async def list_jobs(self) -> tuple[JobView, ...]:
        """Return all jobs of the namespace, by name."""
        jobs, _ = await self._list_with_version("")
        return jobs

    async def watch(self, name: str = "") -> AsyncGenerator[JobEvent]:
        """Yield each job as it is, then every change, over one connection; without a name all of the namespace."""
        seen: dict[str, JobView] = {}
        while True:
            jobs, version = await self._list_with_version(name)
            present = {job.name: job for job in jobs}
            for gone in seen.keys() - present.keys():
                yield JobEvent(seen[gone], is_gone=True)
            for job in jobs:
                if job.name not in seen or seen[job.name].body != job.body:
                    yield JobEvent(job)
            seen = present
            async for event in self._watch_from(name, version):
                _remember_event(seen, event)
                yield event

    async def wait(self, name: str) -> JobView:
        """Return a job once it has succeeded or failed; a job that is deleted before is an error."""
        first = await self.get(name)
        async for event in self.watch(first.name):
            if event.is_gone or event.job.uid != first.uid:
                raise JobRequestError(RequestFailure.NO_JOB, f"{first.name} was deleted before it finished")
            if event.job.is_finished:
                return event.job
        raise AssertionError("a watch has no end")

    async def suspend(self, name: str, *, is_suspended: bool = True) -> str:
        """Stop a job after a checkpoint, or let it go on, and return its name."""
        job_name = (await self.get(name)).name
        with explained_failures(f"cannot change {job_name}"):
            await self._http.patch(self._jobs_path(job_name), {"spec": {"lifecycle": {"suspend": is_suspended}}})
        return job_name

    async def resume(self, name: str) -> str:
        """Let a suspended job go on, and return its name."""
        return await self.suspend(name, is_suspended=False)

    async def cancel(self, name: str) -> str:
        """Delete a job, and no later job of its name. Its pods end; storage.reclaim decides about its volume."""
        job = await self.get(name)
        with explained_failures(f"cannot delete {job.name}"):
            await self._http.delete(self._jobs_path(job.name), {"preconditions": {"uid": job.uid}})
        return job.name

    async def list_evidence(self, jobs: Iterable[JobView]) -> tuple[Raw, ...]:
        """Return jobs with the pods, claims and events of the namespace; kinds that may not be read are left out."""
        bodies: list[Raw] = [{**job.body, "kind": KIND} for job in jobs]
        for kind, plural in _EVIDENCE.items():
            with explained_failures(f"cannot list {plural}"), suppress(Forbidden, NotFound):
                async for page in self._http.list_pages(f"/api/v1/namespaces/{self.namespace}/{plural}", {}):
                    bodies += ({**item, "kind": kind} for item in page.items)
        return tuple(bodies)

    async def _get_latest(self) -> JobView:
        jobs = await self.list_jobs()
        if not jobs:
            text = f"there is no job in the namespace {self.namespace}; -n names another, `moejob submit` creates one"
            raise JobRequestError(RequestFailure.NO_JOB, text)
        return max(jobs, key=lambda job: (job.created_at.timestamp() if job.created_at else 0.0, job.name))

    async def _list_with_version(self, name: str) -> tuple[tuple[JobView, ...], str]:
        bodies: list[Raw] = []
        version = ""
        with explained_failures(f"cannot list jobs in {self.namespace}"):
            async for page in self._http.list_pages(self._jobs_path(), _selected_name(name)):
                bodies += page.items
                version = page.version
        return tuple(sorted(map(JobView, bodies), key=lambda job: job.name)), version

    async def _watch_from(self, name: str, version: str) -> AsyncIterator[JobEvent]:
        """Yield changes from a version on, over one connection after another, until the version is too old."""
        while True:
            try:
                with explained_failures(f"cannot watch jobs in {self.namespace}"):
                    async for event in self._watch_once(name, version):
                        version = event.version
                        if event.change is not None:
                            yield event.change
            except JobRequestError as error:
                if isinstance(error.__cause__, Expired):
                    return
                if not isinstance(error.__cause__, Retryable):
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _watch_once(self, name: str, version: str) -> AsyncIterator[_VersionedChange]:
        async for event in self._http.watch(self._jobs_path(), _selected_name(name), version):
            body = event["object"]
            is_bookmark = event["type"] == "BOOKMARK"
            change = None if is_bookmark else JobEvent(JobView(body), is_gone=event["type"] == "DELETED")
            yield _VersionedChange(body["metadata"]["resourceVersion"], change)

    def _jobs_path(self, name: str = "", version: str = VERSION) -> str:
        path = f"/apis/{GROUP}/{version}/namespaces/{self.namespace}/{PLURAL}"
        return f"{path}/{name}" if name else path


@dataclass(frozen=True, slots=True)
class _VersionedChange:
    """An event of a watch with the version to continue from; a bookmark changes nothing."""

    version: str
    change: JobEvent | None


def _selected_name(name: str) -> dict[str, str]:
    return {"fieldSelector": f"metadata.name={name}"} if name else {}


def _remember_event(seen: dict[str, JobView], event: JobEvent) -> None:
    if event.is_gone:
        seen.pop(event.job.name, None)
    else:
        seen[event.job.name] = event.job
