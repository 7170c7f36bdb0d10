"""The client for programs without an event loop: each call runs the asynchronous one to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from moejob_client.cluster_checks import CheckFinding
from moejob_client.connection import connect_client
from moejob_client.job_view import JobEvent, JobView
from moejob_client.log_lines import LogLine
from moejob_client.log_selection import ALL_LINES, LogSelection
from moejob_client.rank_stacks import PodStacks

if TYPE_CHECKING:
    from moejob_api.job import MoETrainingJob


Item = TypeVar("Item")


class Client:
    """Jobs of one namespace; see AsyncClient, whose methods these are."""

    def __init__(
        self, namespace: str | None = None, context: str | None = None, kubeconfig: Path | None = None
    ) -> None:
        self._runner = asyncio.Runner()
        try:
            self._jobs = self._runner.run(connect_client(namespace, context, kubeconfig))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._runner.run(self._jobs.close())
        self._runner.close()

    @property
    def namespace(self) -> str:
        """Return the namespace of its jobs."""
        return self._jobs.namespace

    def submit(self, job: MoETrainingJob, *, dry_run: bool = False) -> str:
        """Create a job and return its UID; a dry run creates nothing."""
        return self._runner.run(self._jobs.submit(job, dry_run=dry_run))

    def get(self, name: str) -> JobView:
        """Return a job by its name, or the newest by `@latest`."""
        return self._runner.run(self._jobs.get(name))

    def list_jobs(self) -> tuple[JobView, ...]:
        """Return all jobs of the namespace, by name."""
        return self._runner.run(self._jobs.list_jobs())

    def watch(self, name: str = "") -> Iterator[JobEvent]:
        """Yield each job as it is, then every change, over one connection."""
        return self._iterate_items(self._jobs.watch(name))

    def logs(self, name: str, selection: LogSelection = ALL_LINES, *, is_followed: bool = False) -> Iterator[LogLine]:
        """Yield lines of a job's pods by time; see AsyncClient."""
        return self._iterate_items(self._jobs.logs(name, selection, is_followed=is_followed))

    def steps(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of the step log: `pandas.DataFrame(client.steps("job"))`."""
        return self._iterate_items(self._jobs.steps(name))

    def samples(self, name: str, step: int | None = None, *, is_evaluation: bool = False) -> Iterator[dict[str, Any]]:
        """Yield answers with their rewards of a step, or of the newest that has any."""
        return self._iterate_items(self._jobs.samples(name, step, is_evaluation=is_evaluation))

    def copy(self, name: str, path: str, target: Path) -> int:
        """Copy a file or a folder of the run folder into a new folder here."""
        return self._runner.run(self._jobs.copy(name, path, target))

    def export(self, name: str, target: Path, *, to_megatron: bool = False) -> int:
        """Copy the exported model of a job into a new folder here."""
        return self._runner.run(self._jobs.export(name, target, to_megatron=to_megatron))

    def stacks(self, name: str) -> Iterator[PodStacks]:
        """Yield the Python stacks of all ranks, pod by pod; see AsyncClient."""
        return self._iterate_items(self._jobs.stacks(name))

    def check_cluster(self) -> Iterator[CheckFinding]:
        """Yield what the cluster and the rights let jobs of the namespace do, check by check."""
        return self._iterate_items(self._jobs.check_cluster())

    def _iterate_items(self, items: AsyncGenerator[Item]) -> Iterator[Item]:
        """Yield what an asynchronous generator yields, and close it when no more is wanted."""

        async def next_item() -> Item:
            return await anext(items)

        try:
            while True:
                try:
                    yield self._runner.run(next_item())
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(items.aclose())

    def wait(self, name: str) -> JobView:
        """Return a job once it has succeeded or failed."""
        return self._runner.run(self._jobs.wait(name))

    def suspend(self, name: str) -> str:
        """Stop a job after a checkpoint, and return its name."""
        return self._runner.run(self._jobs.suspend(name))

    def resume(self, name: str) -> str:
        """Let a suspended job go on, and return its name."""
        return self._runner.run(self._jobs.resume(name))

    def cancel(self, name: str) -> str:
        """Delete a job, and return its name."""
        return self._runner.run(self._jobs.cancel(name))
