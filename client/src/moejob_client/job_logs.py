"""The logs of a job's pods as one: chosen by rank, node, attempt and time, while pods come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from moejob_api import api_bodies
from moejob_api.contract.names import Label, PodRole
from moejob_client.failures import JobRequestError, RequestFailure, explained_failures
from moejob_client.job_view import JobEvent, JobView
from moejob_client.log_lines import LogLine, LogMerger
from moejob_client.log_selection import LogSelection
from moejob_client.pod_logs import ContainerLog, PodView
from moejob_client.watching import Collection, ObjectWatch

if TYPE_CHECKING:
    from moejob_client.api_client import ApiClient

# A followed log that is silent for longer holds up no line of the others.
_PATIENCE_SECONDS = 0.3
# Tasks beside those of logs.
_WATCHES = frozenset({"pods", "job"})


@dataclass(frozen=True, slots=True)
class LogFilter:
    """A selection, in the words of one job: which pods and which lines."""

    job: JobView
    selection: LogSelection
    rank: int | None
    pod: str | None

    def takes_pod(self, pod: PodView) -> bool:
        """Return whether lines of a pod are wanted."""
        if api_bodies.find_label(pod.body, Label.JOB_UID) not in (None, self.job.uid):
            return False
        if self.pod is not None and pod.name != self.pod:
            return False
        if self.selection.node is not None and pod.node not in ("", self.selection.node):
            return False
        return self.rank is None or (pod.role == PodRole.TRAINER and self._may_have_rank(pod.index))

    def takes_line(self, line: LogLine) -> bool:
        """Return whether a line of a pod is wanted. The launcher's own lines belong to no rank."""
        return self.rank is None or line.rank == self.rank

    def _may_have_rank(self, index: int) -> bool:
        ranks_per_pod = self.job.ranks_per_pod
        if self.job.has_spares:
            return True
        return ranks_per_pod is None or self.rank is None or self.rank // ranks_per_pod == index


def make_filter(job: JobView, selection: LogSelection) -> LogFilter:
    """Find what a selection means for a job."""
    if not selection.is_failed:
        return LogFilter(job, selection, selection.rank, None)
    failure = job.status.last_failure
    if failure is None:
        text = f"no failure of {job.name} is known; leave out --failed"
        raise JobRequestError(RequestFailure.REFUSED, text)
    return LogFilter(job, selection, failure.rank if selection.rank is None else selection.rank, failure.pod)


class JobLogs:
    """The logs of one job."""

    def __init__(self, http: ApiClient, log_filter: LogFilter) -> None:
        self._http = http
        self._filter = log_filter
        self._job = log_filter.job
        since = log_filter.selection.since
        self._since = None if since is None else (datetime.now(UTC) - since).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def find_pods(self) -> tuple[PodView, ...]:
        """Return the pods whose lines are wanted and whose containers have begun."""
        pods = await self.list_pods()
        return tuple(pod for pod in self._chosen_attempt(pods) if pod.starts)

    async def read(self, pods: Iterable[PodView]) -> AsyncGenerator[LogLine]:
        """Yield the lines that there are, by time."""
        merger = LogMerger(None)
        for pod in pods:
            self._add_log(merger, pod, pod.starts, is_followed=False)
        merger.close()
        async with aclosing(self._merge_lines(merger)) as lines:
            async for line in lines:
                yield line

    async def follow(
        self, watch_job: Callable[[], AsyncGenerator[JobEvent]], report: Callable[[str], object]
    ) -> AsyncGenerator[LogLine]:
        """Yield lines by time until the job has finished or is gone; `report` hears what is waited for."""
        merger = LogMerger(_PATIENCE_SECONDS)
        present = await self.list_pods()
        skipped = {pod.uid for pod in present} - {pod.uid for pod in self._chosen_attempt(present)}
        pods = asyncio.create_task(self._attach_pods(merger, skipped, report))
        end = asyncio.create_task(self._await_end(merger, watch_job, skipped, report))
        self._tasks |= {"pods": pods, "job": end}
        end.add_done_callback(lambda _: pods.cancel())
        async with aclosing(self._merge_lines(merger)) as lines:
            async for line in lines:
                yield line

    async def _merge_lines(self, merger: LogMerger) -> AsyncGenerator[LogLine]:
        try:
            async with aclosing(merger.merge_logs()) as lines:
                async for line in lines:
                    if self._filter.takes_line(line):
                        yield line
            await self._raise_failures()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _raise_failures(self) -> None:
        """Raise why a log could not be read: lines of the others have been shown by then."""
        logs = [task for key, task in self._tasks.items() if key not in _WATCHES]
        await asyncio.gather(*logs, return_exceptions=True)
        for task in self._tasks.values():
            if task.done() and not task.cancelled():
                task.result()

    async def _attach_pods(self, merger: LogMerger, skipped: set[str], report: Callable[[str], object]) -> None:
        try:
            async for change in ObjectWatch(self._http, self._pod_collection, _outage_reporter(report)).list_changes():
                pod = PodView(change.body)
                if not change.is_gone and pod.uid not in skipped:
                    self._attach_starts(merger, pod)
        except JobRequestError:
            merger.close()
            raise

    async def _await_end(
        self,
        merger: LogMerger,
        watch_job: Callable[[], AsyncGenerator[JobEvent]],
        skipped: set[str],
        report: Callable[[str], object],
    ) -> None:
        """Close the merge once no further pod comes."""
        try:
            async with aclosing(watch_job()) as events:
                async for event in events:
                    if event.is_gone or event.job.uid != self._job.uid or event.job.is_finished:
                        break
                    if not self._tasks.keys() - _WATCHES:
                        report(_waiting_words(event.job))
            # Pods whose last event is still under way.
            for pod in await self.list_pods():
                if pod.uid not in skipped:
                    self._attach_starts(merger, pod)
        finally:
            merger.close()

    def _attach_starts(self, merger: LogMerger, pod: PodView) -> None:
        if not self._filter.takes_pod(pod) or not self._takes_attempt(pod):
            return
        # The kubelet keeps the log of one start before the present.
        for start in range(max(1, pod.starts - 1), pod.starts + 1):
            self._add_log(merger, pod, start, is_followed=True)

    def _add_log(self, merger: LogMerger, pod: PodView, start: int, *, is_followed: bool) -> None:
        key = f"{pod.uid}/{start}"
        if key in self._tasks:
            return
        merger.add_log(key)
        lines = ContainerLog(self._http, pod, start, self._since).read_lines(is_followed=is_followed)
        self._tasks[key] = asyncio.create_task(merger.feed_log(key, _explain_failures(lines, pod.name)))

    def _chosen_attempt(self, pods: Iterable[PodView]) -> tuple[PodView, ...]:
        """Return the pods of the wanted attempt; engines, which outlive attempts, count their own."""
        wanted = [pod for pod in pods if self._filter.takes_pod(pod)]
        newest = {pod.role: max(each.attempt for each in wanted if each.role == pod.role) for pod in wanted}
        back = 1 if self._filter.selection.is_previous else 0
        if self._filter.selection.attempt is not None:
            return tuple(filter(self._takes_attempt, wanted))
        return tuple(pod for pod in wanted if pod.attempt == newest[pod.role] - back)

    def _takes_attempt(self, pod: PodView) -> bool:
        attempt = self._filter.selection.attempt
        return attempt is None or pod.attempt == attempt

    def takes_recorded(self, line: LogLine) -> bool:
        """Return whether a line of the record is wanted."""
        selection = self._filter.selection
        is_old = selection.since is not None and line.time < datetime.now(UTC) - selection.since
        return self._filter.takes_line(line) and not is_old and selection.node in (None, line.node)

    async def list_pods(self) -> tuple[PodView, ...]:
        """Return all pods of the job as they are now."""
        pods: list[PodView] = []
        with explained_failures("cannot list pods"):
            async for page in self._http.list_pages(self._pod_collection.path, self._pod_collection.query):
                pods += map(PodView, page.items)
        return tuple(pods)

    @property
    def _pod_collection(self) -> Collection:
        path = f"/api/v1/namespaces/{self._job.namespace}/pods"
        return Collection(path, "pods", {"labelSelector": f"{Label.JOB}={self._job.name}"})


async def _explain_failures(lines: AsyncIterator[LogLine], pod: str) -> AsyncIterator[LogLine]:
    with explained_failures(f"cannot read the log of {pod}"):
        async for line in lines:
            yield line


def _waiting_words(job: JobView) -> str:
    blocker = job.status_text("why", "message")
    return f"{job.name}: {job.phase or 'New'}, no pod has started yet" + (f": {blocker}" if blocker else "")


def _outage_reporter(report: Callable[[str], object]) -> Callable[[str | None], object]:
    def report_outage(reason: str | None) -> None:
        report("the API server answers again" if reason is None else f"{reason}; trying again")

    return report_outage
