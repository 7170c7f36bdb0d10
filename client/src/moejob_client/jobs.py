"""Jobs of a namespace, asked of and steered through the API server. Needs rights in that namespace alone.

A watch is one connection for all jobs of a namespace, continued from the version that it last saw.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from moejob_api import api_bodies
from moejob_api.api_bodies import Raw
from moejob_api.contract.names import RunFile
from moejob_api.job import GROUP, KIND, PLURAL, VERSION
from moejob_client.failures import JobRequestError, RequestFailure, explained_failures
from moejob_client.job_view import LATEST, JobEvent, JobView
from moejob_client.log_selection import ALL_LINES, LogSelection
from moejob_client.watching import Collection, ObjectWatch, ReportOutage

if TYPE_CHECKING:
    from moejob_api.job import MoETrainingJob
    from moejob_client.api_client import ApiClient
    from moejob_client.cluster_checks import CheckFinding
    from moejob_client.job_logs import JobLogs
    from moejob_client.job_volume import JobVolume
    from moejob_client.log_lines import LogLine
    from moejob_client.pod_logs import PodView
    from moejob_client.rank_stacks import PodStacks
    from moejob_client.run_mirror import RunMirror

# What holds up a job lies in these, for the diagnosis.
_EVIDENCE = {"Pod": "pods", "PersistentVolumeClaim": "persistentvolumeclaims", "Event": "events"}


@dataclass(frozen=True, slots=True)
class NamespaceEvidence:
    """Objects of a namespace that explain its jobs, and the plurals of those that the rights do not let read."""

    objects: tuple[Raw, ...]
    unread: tuple[str, ...]


def _ignore_report(_: str) -> None:
    pass


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

    @property
    def host(self) -> str:
        """Return the address of the API server."""
        return self._http.host

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
        bodies: list[Raw] = []
        with explained_failures(f"cannot list jobs in {self.namespace}"):
            async for page in self._http.list_pages(self._jobs_path(), {}):
                bodies += page.items
        return tuple(sorted(map(JobView, bodies), key=lambda job: job.name))

    async def watch(self, name: str = "", report_outage: ReportOutage | None = None) -> AsyncGenerator[JobEvent]:
        """Yield each job as it is, then every change, over one connection; without a name all of the namespace.

        An API server that stops to answer is asked again for ever; `report_outage` hears of it, and of its return.
        """
        collection = Collection(self._jobs_path(), f"jobs in {self.namespace}", _selected_name(name))
        async for change in ObjectWatch(self._http, collection, report_outage).list_changes():
            yield JobEvent(JobView(change.body), is_gone=change.is_gone)

    async def wait(self, name: str) -> JobView:
        """Return a job once it has succeeded or failed; a job that is deleted before is an error."""
        first = await self.get(name)
        async for event in self.watch(first.name):
            if event.is_gone or event.job.uid != first.uid:
                raise JobRequestError(RequestFailure.NO_JOB, f"{first.name} was deleted before it finished")
            if event.job.is_finished:
                return event.job
        raise AssertionError("a watch has no end")

    async def logs(
        self,
        name: str,
        selection: LogSelection = ALL_LINES,
        *,
        is_followed: bool = False,
        report: Callable[[str], object] = _ignore_report,
    ) -> AsyncGenerator[LogLine]:
        """Yield lines of a job's pods by time.

        A log that is followed waits for pods, continues with those that replace them, and ends with the job; `report`
        hears what it waits for.
        """
        from moejob_client.job_logs import JobLogs, make_filter

        with explained_failures(f"cannot get {name}"):
            job = await self.get(name)
        job_logs = JobLogs(self._http, make_filter(job, selection))
        if is_followed:
            lines = job_logs.follow(lambda: self.watch(job.name), report)
        else:
            pods = await job_logs.find_pods()
            lines = job_logs.read(pods) if pods else self._read_record(job, job_logs, selection, report)
        async with aclosing(lines):
            async for line in lines:
                yield line

    async def _read_record(
        self, job: JobView, job_logs: JobLogs, selection: LogSelection, report: Callable[[str], object]
    ) -> AsyncGenerator[LogLine]:
        """Yield the lines that the record on the volume keeps, where pods are gone."""
        from moejob_client.job_files import read_record_lines

        nothing = f"{job.name} has no pods whose log could be read; `moejob logs -f` waits for them"
        if job.status.start_time is None:
            raise JobRequestError(RequestFailure.NO_LOG, nothing)
        attempt = selection.attempt
        if selection.is_previous:
            attempt = job.status.attempt - 1
        count = 0
        async with self._open_volume(job, report) as volume:
            async for line in read_record_lines(volume, attempt):
                if job_logs.takes_recorded(line):
                    count += 1
                    yield line
        if not count:
            raise JobRequestError(RequestFailure.NO_LOG, f"{nothing}; the record on its volume has no such lines")

    async def steps(
        self, name: str, report: Callable[[str], object] = _ignore_report
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the lines of the step log, ready for a data frame. The last line of a step counts."""
        from moejob_client.job_files import read_steps

        async with self._open_volume(await self.get(name), report) as volume, aclosing(read_steps(volume)) as steps:
            async for step in steps:
                yield step

    async def samples(
        self,
        name: str,
        step: int | None = None,
        *,
        is_evaluation: bool = False,
        report: Callable[[str], object] = _ignore_report,
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield answers with their rewards of a step, or of the newest that has any; or those of an evaluation."""
        from moejob_client.job_files import read_samples

        async with (
            self._open_volume(await self.get(name), report) as volume,
            aclosing(read_samples(volume, step, is_evaluation=is_evaluation)) as samples,
        ):
            async for sample in samples:
                yield sample

    async def copy(self, name: str, path: str, target: Path, report: Callable[[str], object] = _ignore_report) -> int:
        """Copy a file or a folder of the run folder into a new folder here, and return how many files it has."""
        from moejob_client.job_files import copy_files

        async with self._open_volume(await self.get(name), report) as volume:
            return await copy_files(volume, path, target)

    async def export(
        self, name: str, target: Path, *, to_megatron: bool = False, report: Callable[[str], object] = _ignore_report
    ) -> int:
        """Copy the exported model of a job into a new folder here, and return how many files it has."""
        job = await self.get(name)
        try:
            return await self.copy(job.name, RunFile.EXPORT_MEGATRON if to_megatron else RunFile.EXPORT, target, report)
        except JobRequestError as error:
            if error.kind is not RequestFailure.NO_FILE:
                raise
            field = "checkpoint.exportMegatron" if to_megatron else "checkpoint.exportHuggingFace"
            text = (
                f"{job.name} is {job.phase or 'New'} and has no export; a run writes one at its end if {field} is true"
            )
            fix = f"`moejob cp {job.name} checkpoints FOLDER` copies its checkpoints"
            raise JobRequestError(RequestFailure.NO_FILE, f"{text}; {fix}") from error

    async def last_steps(self, name: str, count: int) -> list[dict[str, Any]] | None:
        """Return the last lines of the step log, by a running pod; None where none runs. Never starts a pod."""
        from moejob_client.job_files import read_last_steps
        from moejob_client.job_volume import has_running_trainer, open_volume

        job = await self.get(name)
        pods = await self._list_pods(job)
        if not has_running_trainer(pods):
            return None
        async with open_volume(self._http, job, pods, _ignore_report) as volume:
            return await read_last_steps(volume, count)

    async def refresh_mirror(
        self, name: str, mirror: RunMirror, *, may_start_pod: bool, report: Callable[[str], object] = _ignore_report
    ) -> bool:
        """Bring a copy of the run folder up to date; False where no pod runs and none may be started."""
        from moejob_client.job_volume import has_running_trainer, open_volume

        job = await self.get(name)
        pods = await self._list_pods(job)
        if not may_start_pod and not has_running_trainer(pods):
            return False
        async with open_volume(self._http, job, pods, report) as volume:
            await mirror.refresh_files(volume)
        return True

    async def stacks(self, name: str) -> AsyncGenerator[PodStacks]:
        """Yield the Python stacks of all ranks, pod by pod. No rank stops or fails of it."""
        from moejob_client.rank_stacks import read_pod_stacks

        job = await self.get(name)
        async with aclosing(read_pod_stacks(self._http, job, await self._list_pods(job))) as pods:
            async for pod in pods:
                yield pod

    async def _list_pods(self, job: JobView) -> tuple[PodView, ...]:
        from moejob_client.job_logs import JobLogs, make_filter

        return await JobLogs(self._http, make_filter(job, ALL_LINES)).list_pods()

    @asynccontextmanager
    async def _open_volume(self, job: JobView, report: Callable[[str], object]) -> AsyncIterator[JobVolume]:
        from moejob_client.job_volume import open_volume

        pods = await self._list_pods(job)
        async with open_volume(self._http, job, pods, report) as volume:
            yield volume

    async def suspend(self, name: str, *, is_suspended: bool = True) -> str:
        """Stop a job after a checkpoint, or let it go on, and return its name."""
        job_name = (await self.get(name)).name
        with explained_failures(f"cannot change {job_name}"):
            # Strict, as in `submit`: the change would be dropped, and success reported.
            path = f"{self._jobs_path(job_name)}?fieldValidation=Strict"
            await self._http.patch(path, {"spec": {"lifecycle": {"suspend": is_suspended}}})
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

    async def check_cluster(self) -> AsyncGenerator[CheckFinding]:
        """Yield what the cluster and the rights let jobs of the namespace do, check by check."""
        from moejob_client.cluster_checks import run_checks

        async for finding in run_checks(self._http, self.namespace):
            yield finding

    async def list_evidence(self, jobs: Iterable[JobView]) -> NamespaceEvidence:
        """Return jobs with the pods, claims and events of the namespace, and the kinds that may not be read."""
        bodies: list[Raw] = [{**job.body, "kind": KIND} for job in jobs]
        unread: list[str] = []
        for kind, plural in _EVIDENCE.items():
            try:
                with explained_failures(f"cannot list {plural}"):
                    async for page in self._http.list_pages(f"/api/v1/namespaces/{self.namespace}/{plural}", {}):
                        bodies += ({**item, "kind": kind} for item in page.items)
            except JobRequestError as error:
                if error.kind is not RequestFailure.NO_RIGHTS:
                    raise
                unread.append(plural)
        return NamespaceEvidence(tuple(bodies), tuple(unread))

    async def _get_latest(self) -> JobView:
        jobs = await self.list_jobs()
        if not jobs:
            text = f"there is no job in the namespace {self.namespace}; -n names another, `moejob submit` creates one"
            raise JobRequestError(RequestFailure.NO_JOB, text)
        return max(jobs, key=lambda job: (job.created_at.timestamp() if job.created_at else 0.0, job.name))

    def _jobs_path(self, name: str = "", version: str = VERSION) -> str:
        path = f"/apis/{GROUP}/{version}/namespaces/{self.namespace}/{PLURAL}"
        return f"{path}/{name}" if name else path


def _selected_name(name: str) -> dict[str, str]:
    return {"fieldSelector": f"metadata.name={name}"} if name else {}
