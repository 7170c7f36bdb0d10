"""The client for programs without an event loop: each call runs the asynchronous one to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from moejob_client.connection import connect_client
from moejob_client.jobs import JobEvent, JobView

if TYPE_CHECKING:
    from moejob_api.job import MoETrainingJob


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
        events = self._jobs.watch(name)

        async def next_event() -> JobEvent:
            return await anext(events)

        while True:
            yield self._runner.run(next_event())

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
