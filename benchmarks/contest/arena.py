"""One control plane on which contenders run side by side, and what is done to each of them: bursts, looks, restarts."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contest.audit import Story, Tail
from benchmarks.contest.contenders import Contender
from benchmarks.contest.costs import Costs, costs
from benchmarks.contest.histograms import Histogram
from cluster.control_plane.components import Component
from cluster.control_plane.plane import ControlPlane
from moejob_client.api_client import ApiClient
from moejob_client.credentials import load_credentials

_AT_ONCE = 16
_POLL_SECONDS = 0.02
# So long without a request, an operator has done what there was to do.
_QUIET_SECONDS = 1.0
_SECONDS = 400.0
# Longer than an operator keeps a connection that it does not use: aiohttp looks every 15 s for those unused for 15 s.
_KEPT_OPEN_SECONDS = 40.0
# Half a minute: all pods are asked how they are once in it, and between that nothing is under way.
_LOOKS_AT_REST = 150


class TooSlowError(Exception):
    """A contender did not get there in time."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Jobs created together, as their contender took them."""

    jobs: int
    story: Story
    before: Costs
    after: Costs
    # Of the controller manager, which makes a peer's pods and everybody's endpoints.
    manager_cpu_seconds: float

    @property
    def cpu_ms_per_job(self) -> float:
        """Of the contender's own process, until it was quiet again."""
        return 1000 * (self.after.cpu_seconds - self.before.cpu_seconds) / self.jobs

    @property
    def whole_cpu_ms_per_job(self) -> float:
        """Of the contender and, in the same time, of the controller manager."""
        return self.cpu_ms_per_job + 1000 * self.manager_cpu_seconds / self.jobs

    @property
    def requests_per_job(self) -> float:
        """To the API server, watches left out."""
        return self.story.requests.total() / self.jobs

    @property
    def most_status_writes(self) -> int:
        """Of the job that had most of them."""
        return max(self.story.status_writes.values())


class _Uncounted:
    def count_request(self, verb: str, resource: str, code: str, seconds: float) -> None:
        """Return what the benchmark itself asks is no result."""


@dataclass
class Arena:
    """The control plane, and the person who creates jobs on it."""

    plane: ControlPlane
    api: ApiClient
    tail: Tail
    _named: int = 0
    _stories: list[Story] = field(default_factory=list)

    async def burst(self, contender: Contender, count: int, pods: int, quiet_seconds: float = _QUIET_SECONDS) -> Burst:
        """Create jobs as fast as they are taken; return when all pods run and the contender is quiet."""
        names = [f"j{self._named + index:05}" for index in range(count)]
        self._named += count
        with self._follow_story(contender) as story:
            before, manager_before = contender.costs(), self._manager_cpu_seconds()
            free = asyncio.Semaphore(_AT_ONCE)
            await asyncio.gather(*(self._create(contender, contender.body(name, pods), free) for name in names))
            await self.until_running(contender, story, count * pods)
            await self.until_quiet(story, quiet_seconds)
            by_manager = self._manager_cpu_seconds() - manager_before
            return Burst(count, story, before, contender.costs(), by_manager)

    async def idle_looks(self, contender: Contender, count: int) -> Histogram:
        """Change what no contender reads, of this many jobs in turn, and see how long each look takes."""
        before = contender.looks()
        names = [
            job["metadata"]["name"]
            async for page in self.api.list_pages(contender.collection, {})
            for job in page.items
        ]
        with self._follow_story(contender) as story:
            for name in names[:count]:
                about = {"metadata": {"annotations": {"seen": str(time.time())}}}
                await self.api.patch(f"{contender.collection}/{name}", about)
            await self.until_quiet(story)
        return contender.looks().since(before)

    async def restart(self, contender: Contender, name: str, pods: int) -> float:
        """Delete all pods of a job at once. Seconds until as many run again."""
        with self._follow_story(contender) as story:
            started = time.time()
            chosen = [f"--selector={contender.label}={name}", f"--namespace={contender.namespace}"]
            await asyncio.to_thread(self.plane.kubectl, "delete", "pods", "--wait=false", "--grace-period=0", *chosen)
            await self.until_running(contender, story, pods)
            return max(max(times) for times in story.running_at.values()) - started

    async def delete(self, contender: Contender, names: Sequence[str]) -> None:
        """Delete jobs, and return when their pods have gone with them."""
        for name in names:
            await self.api.delete(f"{contender.collection}/{name}", {"propagationPolicy": "Background"})
        deadline = time.monotonic() + _SECONDS
        while any(pod.rpartition("/")[2].partition("-")[0] in names for pod in await self.pods(contender)):
            if time.monotonic() > deadline:
                raise TooSlowError(f"pods of deleted jobs of {contender.name} are still there")
            await asyncio.sleep(10 * _POLL_SECONDS)

    async def pods(self, contender: Contender) -> frozenset[str]:
        """UID/name of each pod that there is."""
        path = f"/api/v1/namespaces/{contender.namespace}/pods"
        about = [pod["metadata"] async for page in self.api.list_pages(path, {}) for pod in page.items]
        return frozenset(f"{pod['uid']}/{pod['name']}" for pod in about)

    async def until_running(self, contender: Contender, story: Story, pods: int) -> None:
        """Wait until this many pods run."""
        deadline = time.monotonic() + _SECONDS
        while story.pods_running < pods:
            if time.monotonic() > deadline:
                raise TooSlowError(f"{contender.name}: {story.pods_running} of {pods} pods run after {_SECONDS:g} s")
            await asyncio.sleep(_POLL_SECONDS)
            self._read()

    async def until_quiet(self, story: Story, quiet_seconds: float = _QUIET_SECONDS) -> None:
        """Wait for a contender to have asked nothing for a while."""
        deadline = time.monotonic() + _SECONDS
        while time.time() - story.last_request_at < quiet_seconds and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            self._read()

    async def at_rest(self, contender: Contender, metric: str) -> tuple[Costs, float]:
        """Return what it takes once it has given back the connections of its last work, and the least of a metric."""
        await asyncio.sleep(_KEPT_OPEN_SECONDS)
        # Pods may just be asked how they are.
        seen = []
        for _ in range(_LOOKS_AT_REST):
            seen.append((contender.costs(), contender.metric(metric)))
            await asyncio.sleep(10 * _POLL_SECONDS)
        held, values = zip(*seen, strict=True)
        return min(held, key=lambda costs: costs.descriptors), min(values)

    def _manager_cpu_seconds(self) -> float:
        pid = self.plane.processes[Component.CONTROLLER_MANAGER].pid
        return 0.0 if pid is None else costs(pid).cpu_seconds

    def _read(self) -> None:
        for entry in self.tail.entries():
            for story in self._stories:
                story.tell(entry)

    @contextmanager
    def _follow_story(self, contender: Contender) -> Iterator[Story]:
        self._read()
        story = Story(contender.namespace, contender.user)
        self._stories.append(story)
        try:
            yield story
        finally:
            self._stories.remove(story)

    async def _create(self, contender: Contender, body: dict[str, object], free: asyncio.Semaphore) -> None:
        async with free:
            await self.api.create(contender.collection, body)


@asynccontextmanager
async def arena(plane: ControlPlane) -> AsyncIterator[Arena]:
    """On a plane where pods are placed as they are created."""
    plane.kubectl("apply", "--server-side", "-f", Path(__file__).parent / "placed.yaml")
    api = ApiClient(await load_credentials(plane.kubeconfig), _Uncounted(), concurrency=_AT_ONCE, seconds=60.0)
    try:
        yield Arena(plane, api, Tail(plane.audit_log))
    finally:
        await api.close()


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)
